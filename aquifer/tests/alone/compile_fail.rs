//! Mistakes that the types forbid: each file of `compile_fail` must not compile, and has the
//! compiler's message.
//!
//! `TRYBUILD=overwrite` records the messages of a new compiler.

#[test]
fn mistakes_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
