//! Mistakes that the types forbid: each file of `compile_fail` must not compile, and has the
//! compiler's message.
//!
//! Checks every dependency anew, so it is ignored: `cargo test -p aquifer --test alone mistakes --
//! --ignored`. `TRYBUILD=overwrite` records the messages of a new compiler.

#[test]
#[ignore = "half a minute, and messages of one compiler"]
fn mistakes_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
