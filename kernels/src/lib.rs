//! A small set of GPU kernels on device memory, for real and virtual devices.
//!
//! [`Kernels`] is the set, loaded on a device. Its methods take [`Operand`]s and [`Target`]s, to
//! which references to the buffers of the crate `aquifer` convert. A method checks its operands,
//! orders the stream after other streams' work with the same memory, and launches the kernel.
//!
//! Each kernel is declared once ([`Kernel`]): its name and parameters, its reads and writes, its
//! launch shape, and its host implementation, which virtual devices run and against which the
//! device code is tested. Device code is CUDA C (`cuda/`), compiled to PTX that is part of the
//! crate ([`Module`]), so building needs no CUDA toolkit.
//!
//! # Custom kernels
//!
//! A custom kernel consists of PTX text, which the driver compiles; an [`aquifer_device::Launch`],
//! which declares its memory accesses; and an [`aquifer_allocator::AccessGuard`] with that memory,
//! which orders it after earlier work of other streams there, and their later work after it.
//! Virtual devices run a closure in its place.
//!
//! ```
//! use std::sync::Arc;
//!
//! use aquifer::device::{AccessKind, AccessRange, HostKernel, KernelArg, Launch};
//! use aquifer::prelude::*;
//!
//! const TWICE: &str = "
//!     .version 7.0
//!     .target sm_70
//!     .address_size 64
//!     .visible .entry twice(.param .u64 x, .param .u32 n)
//!     {
//!         .reg .pred %done;
//!         .reg .b32 %r<5>;
//!         .reg .b64 %rd<2>;
//!         .reg .f32 %f;
//!         mov.u32 %r0, %ctaid.x;
//!         mov.u32 %r1, %ntid.x;
//!         mov.u32 %r2, %tid.x;
//!         mad.lo.u32 %r3, %r0, %r1, %r2;
//!         ld.param.u32 %r4, [n];
//!         setp.ge.u32 %done, %r3, %r4;
//!         @%done ret;
//!         ld.param.u64 %rd0, [x];
//!         cvta.to.global.u64 %rd0, %rd0;
//!         mad.wide.u32 %rd1, %r3, 4, %rd0;
//!         ld.global.f32 %f, [%rd1];
//!         add.f32 %f, %f, %f;
//!         st.global.f32 [%rd1], %f;
//!         ret;
//!     }";
//!
//! let device = aquifer::open("sim:24GiB")?;
//! let (memory, one, two) = (Allocator::of(&device)?, device.stream()?, device.stream()?);
//! let len = 1000u32;
//! let mut x = memory.alloc::<f32>(len as usize, &one)?;
//! x.fill(1.5, &one)?;
//!
//! let module = device.driver().load_module(TWICE)?;
//! let on_host: HostKernel = Arc::new(|memory, args| {
//!     if let &[KernelArg::Ptr(x), KernelArg::U32(n)] = args {
//!         let mut floats = vec![0; 4 * n as usize];
//!         memory.read(x, &mut floats)?;
//!         for float in floats.as_chunks_mut::<4>().0 {
//!             *float = (2.0 * f32::from_ne_bytes(*float)).to_ne_bytes();
//!         }
//!         memory.write(x, &floats)?;
//!     }
//!     Ok(())
//! });
//! let launch = Launch {
//!     name: "twice",
//!     module: Some(module),
//!     grid: [len.div_ceil(256), 1, 1],
//!     block: [256, 1, 1],
//!     args: vec![KernelArg::Ptr(x.ptr()), KernelArg::U32(len)],
//!     accesses: vec![AccessRange { ptr: x.ptr(), bytes: x.bytes(), kind: AccessKind::Write }],
//!     host: Some(on_host),
//!     ..Launch::default()
//! };
//! // On another stream than the fill: `with` orders the launch after it.
//! // SAFETY: the kernel reads and writes `len` floats at `x`, as declared, which the buffer holds.
//! with(&two, [write(&mut x)], |stream, _| unsafe { stream.launch(&launch) })?;
//! assert_eq!(x.to_vec(&one)?, [3.0; 1000]);
//! device.assert_no_violations();
//! device.unload_later(module); // once its kernels are done
//! # Ok::<(), aquifer::Error>(())
//! ```
//!
//! # How the crate is made
//!
//! The file of an operation holds, from top to bottom, the declaration, the host implementation and
//! the method.
#![deny(unsafe_code)]

mod add;
mod args;
mod arithmetic;
mod axpy;
mod cast;
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

pub use args::KernelParam;
pub use dtype::{DType, Element, UnknownDType};
pub use error::{KernelError, OperandError, OperandFault};
pub use kernel::Kernel;
pub use kernels::Kernels;
pub use module::Module;
pub use on_host::{ConvertError, convert_host};
pub use operand::{Operand, Target};
pub use pattern::{Mismatches, pattern_bytes, pattern_word};
pub use set::{KERNELS, find};
pub use strided::Strided;
