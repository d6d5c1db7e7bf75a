//! The kernels against simple oracles, on the simulated device or on the one that
//! `AQUIFER_TEST_DEVICE` names: `AQUIFER_TEST_DEVICE=cuda:0 cargo test -p aquifer-kernels`.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "tests may, also outside of test functions")]
#![allow(clippy::cast_possible_truncation, reason = "what oracles keep of a number is the point of them")]

mod arithmetic;
mod bench;
mod bytes;
mod cast;
mod layout;
mod matmul;
mod ptx;
mod reduce;
mod set;
mod streams;
mod wrong_use;
