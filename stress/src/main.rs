//! The stress program.
fn main() {}
