//! The methods of [`Allocator`](crate::Allocator), by subject. Each calls one operation.

mod alloc;
mod inspect;
mod manage;
