//! Transfers as programs use them.
//!
//! `abandoned` needs a process in which no other test opens an allocator: opening one also gives
//! memory back. `compile_fail` opens none, and `overhead` runs only on request.

mod abandoned;
mod compile_fail;
mod overhead;
