//! Tests beside which no other one opens an allocator.
//!
//! `abandoned` needs such a process: opening an allocator also gives memory back. `compile_fail`
//! opens none. It and `overhead` run only on request.

mod abandoned;
mod compile_fail;
mod overhead;
