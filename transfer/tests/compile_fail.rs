//! What the types forbid: each file of `compile_fail` is a mistake that must not compile, with what
//! the compiler says.
//!
//! `TRYBUILD=overwrite` writes down what a new compiler says.

#[test]
fn mistakes_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
