//! A small set of GPU kernels on typed buffers, to be loaded on real devices and simulated ones alike.
//!
//! In the order in which data flows: [`Kernels`] is the set loaded on a device; its methods take [`Operand`]s and [`Target`]s, which
//! any [`aquifer_allocator::DeviceBuffer`] is, check them, order the stream after what others did with the same memory, and launch.
//! Each kernel is declared once ([`Kernel`]): its name and parameters, what it reads and writes, its shape, and its host implementation,
//! which simulated devices run and against which the device code is tested. Device code is CUDA C (`cuda/`), compiled to PTX that is
//! part of the crate ([`Module`]): building needs no CUDA.
//!
//! Files of operations hold the declaration, the host implementation and the method, top-down.
#![deny(unsafe_code)]

mod add;
mod args;
mod arithmetic;
mod axpy;
mod cast;
mod checksum;
mod convert;
mod dtype;
mod error;
mod fill;
mod host;
mod kernel;
mod kernels;
mod matmul;
mod module;
mod on_host;
mod operand;
mod pattern;
mod reduce;
mod set;
mod spin;
mod strided;
mod transpose;

pub use args::Param;
pub use checksum::checksum_of;
pub use dtype::{DType, Element};
pub use error::{Fault, KernelError, OperandError};
pub use kernel::{Kernel, Shape};
pub use kernels::Kernels;
pub use module::Module;
pub use on_host::{ConvertError, convert_host};
pub use operand::{Operand, Target};
pub use pattern::{Mismatches, pattern_bytes, pattern_word};
pub use set::{KERNELS, find};
pub use strided::Strided;
