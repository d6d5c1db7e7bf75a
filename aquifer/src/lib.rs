//! GPU memory for Rust programs: a caching allocator, transfers, tensors and a small kernel set, on
//! NVIDIA GPUs or on a simulated one.
//!
//! | I want to | start at |
//! | --- | --- |
//! | open a GPU, or a simulated one | [`open()`], [`open_best`] |
//! | allocate | [allocate](#allocate): [`Allocator`], [`Buffer`] |
//! | copy | [copy](#copy): [`Buffer`], [`PinnedBuffer`] |
//! | launch captured work with one call | [`Allocator::graph`], [`Graph`], `docs/cuda-graphs.md` |
//! | use several streams, or call my own kernels | [streams](#streams): [`with`](buffer::with) |
//! | keep a GPU busy with batches | [`Allocator::prefetch`], `examples/loader.rs` |
//! | load a model | [load a model](#load-a-model): [`Tensor`], [`tensor::ParamSet`] |
//! | recover when memory runs out | [out of memory](#out-of-memory): [`Error::is_out_of_memory`] |
//! | know where memory went | [statistics](#statistics): [`Allocator::stats`](aquifer_allocator::Allocator::stats), [`Allocator::snapshot`](aquifer_allocator::Allocator::snapshot) |
//! | test without a GPU | [test without a GPU](#test-without-a-gpu): [`device::sim`] |
//! | share a context or a stream with cudarc | `device::cuda` |
//! | find what I know from PyTorch or cudarc | `docs/from-pytorch.md`, `docs/from-cudarc.md` |
//!
//! [`prelude`] has what programs import. The modules hold what libraries and adapters need beside
//! it.
//!
//! # Allocate
//!
//! A device has one allocator in a process ([`Allocator::of`]), which all parts of the program
//! share. A [`Buffer`] can be dropped at any time: its memory is reused once the device is done
//! with it.
//!
//! ```
//! use aquifer::prelude::*;
//! let device = aquifer::open("sim:24GiB")?; // "cuda:0" on a GPU
//! let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
//! let mut x = memory.alloc_zeros::<f32>(1024, &stream)?;
//! x.slice_mut(..512).fill(1.0, &stream)?;
//! let y = memory.from_slice(&[1.0_f32, 2.0, 3.0], &stream)?;
//! assert_eq!((x.len(), y.bytes()), (1024, 12));
//! # Ok::<(), aquifer::Error>(())
//! ```
//!
//! # Copy
//!
//! The verbs `upload`, `download`, `copy_from`, `to_vec` and `item` take any source or target:
//! slices and vectors, pinned memory, files, buffers and their views, of any device, and
//! strided regions of these. `upload` and `download` return a [`Pending`], which can be waited for,
//! awaited or dropped; `to_vec`, `item` and `download_blocking` wait.
//!
//! ```
//! use aquifer::prelude::*;
//! # let device = aquifer::open("sim:24GiB")?;
//! # let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
//! let pinned = memory.pinned_from_slice(&[1.0_f32; 1000])?;
//! let mut x = memory.alloc::<f32>(1000, &stream)?;
//! let upload = x.upload(&pinned, &stream)?; // returns at once
//! let mut y = x.like(&stream)?;
//! y.copy_from(&x, &stream)?; // on the device, after the upload
//! upload.wait()?;
//! assert_eq!(y.slice(999..).to_vec(&stream)?, [1.0]);
//! # Ok::<(), aquifer::Error>(())
//! ```
//!
//! # Streams
//!
//! Each call takes the stream that it runs on, and comes after everything that was enqueued on its
//! buffers before, on any stream. Work of one's own is ordered by `with`:
//!
//! ```
//! use aquifer::prelude::*;
//! # let device = aquifer::open("sim:24GiB,violations=panic")?;
//! # let memory = Allocator::of(&device)?;
//! let (compute, copies) = (device.stream()?, device.stream()?);
//! let x = memory.alloc_zeros::<f32>(1000, &compute)?;
//! let mut y = memory.alloc::<f32>(1000, &compute)?;
//! // `raw` may be given to anything that enqueues on a stream: a kernel launch, a library.
//! with(&copies, [read(&x), write(&mut y)], |raw, [x, y]| raw.copy(y.ptr(), x.ptr(), x.bytes()))?;
//! drop(x); // its memory is not reused before the copy is done
//! assert_eq!(y.to_vec(&compute)?, vec![0.0; 1000]);
//! # Ok::<(), aquifer::Error>(())
//! ```
//!
//! | what uses the memory on another stream | what to do |
//! | --- | --- |
//! | methods of buffers and tensors | nothing |
//! | work that you enqueue: a kernel, a library's call | [`with(&stream, [read(&x), write(&mut y)], …)`](buffer::with) |
//! | code that keeps the address and enqueues later | [`Buffer::ready_on`] for each such stream |
//! | work on an [`Allocation`](memory::Allocation), which has no order of its own | [`Stream::wait_for`], and [`Allocation::record_stream`](memory::Allocation::record_stream) |
//!
//! # Load a model
//!
//! ```
//! use aquifer::prelude::*;
//! # use aquifer::tensor::ParamSet;
//! # let device = aquifer::open("sim:24GiB")?;
//! # let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
//! # let path = std::env::temp_dir().join(format!("aquifer-doc-{}.safetensors", std::process::id()));
//! # let mut model = ParamSet::new();
//! # model.insert("linear.weight", Tensor::from_vec(vec![0.5_f32; 6], &[2, 3])?)?;
//! # model.save_blocking(&path)?;
//! let model = memory.load_safetensors(&path)?; // through pinned memory, to the device
//! let weight = model.get("linear.weight").expect("the file has one");
//! let input = Tensor::from_vec(vec![1.0_f32; 3], &[3, 1])?.to(&memory)?.wait()?;
//! let output = weight.matmul(&input, &stream)?;
//! assert_eq!(output.to_vec::<f32>()?, [1.5, 1.5]);
//! # std::fs::remove_file(&path).ok();
//! # Ok::<(), aquifer::Error>(())
//! ```
//!
//! # Out of memory
//!
//! An allocation that finds no memory has tried everything first: it gives cached memory back,
//! waits for streams, and moves free memory to where it is needed. The error carries a report, and
//! everything still works.
//!
//! ```
//! use aquifer::prelude::*;
//! # let device = aquifer::open("sim:1GiB")?;
//! # let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
//! let mut cache = vec![memory.alloc::<u8>(600 << 20, &stream)?];
//! let block = match memory.alloc::<u8>(600 << 20, &stream) {
//!     Err(error) if error.is_out_of_memory() => {
//!         eprintln!("{error}"); // what is held, what refused, and what helps
//!         cache.clear();
//!         memory.alloc(600 << 20, &stream)?
//!     }
//!     served => served?,
//! };
//! # drop(block);
//! # Ok::<(), aquifer::Error>(())
//! ```
//!
//! # Statistics
//!
//! Names and meanings are PyTorch's.
//! [`Allocator::snapshot`](aquifer_allocator::Allocator::snapshot) has every block; saved to a
//! file, PyTorch's memory viewer opens it.
//!
//! ```
//! use aquifer::prelude::*;
//! # let device = aquifer::open("sim:24GiB")?;
//! # let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
//! let x = memory.alloc::<f32>(1 << 20, &stream)?;
//! assert_eq!(memory.stats().allocated_bytes.all.current, 4 << 20);
//! assert_eq!(memory.max_memory_allocated(), 4 << 20);
//! println!("{}", memory.summary());
//! let path = std::env::temp_dir().join(format!("aquifer-doc-{}.pickle", std::process::id()));
//! memory.snapshot().save(&path)?;
//! # std::fs::remove_file(&path).ok();
//! # drop(x);
//! # Ok::<(), aquifer::Error>(())
//! ```
//!
//! # Test without a GPU
//!
//! A simulated device runs the same program on real data, in virtual time. It finds races between
//! streams, work beyond the bounds of a block or after its end, and reads of memory that was never
//! written. With `violations=panic` such work panics in the call that enqueues it, and a race in
//! the next call that waits, or when the device is dropped; the text names both places. Without it,
//! `device.assert_no_violations()` tells:
//!
//! ```should_panic
//! use aquifer::prelude::*;
//! let device = aquifer::open("sim:24GiB,violations=panic")?;
//! let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
//! let mut x = memory.alloc::<u8>(1000, &stream)?;
//! with(&stream, [write(&mut x)], |raw, [x]| raw.fill(x.ptr(), 0, 2000))?; // panics: beyond the end of `x`
//! # Ok::<(), aquifer::Error>(())
//! ```
//!
//! # Features
//!
//! | feature | default | what it does |
//! | --- | --- | --- |
//! | `cuda` | yes | NVIDIA GPUs through the CUDA driver, which is loaded at run time. Building needs no toolkit |
//! | `nvml` | yes | enables `cuda`, and attributes a GPU's memory to processes ([`Allocator::attribution`](aquifer_allocator::Allocator::attribution)) |
//! | `sim` | yes | the simulated GPU |
//! | `metrics` | no | `aquifer::metrics` records statistics through the crate `metrics` |
//!
//! Events go to `tracing` whatever the features; `docs/statistics.md` lists targets and fields.

#![deny(unsafe_code)]

mod allocator;
pub mod buffer;
mod error;
mod followed_graph;
mod graph;
mod layout;
#[cfg(feature = "metrics")]
pub mod metrics;
mod open;
mod params;
mod prefetch;
mod spill;
pub mod tensor;
pub mod transfer;

pub use allocator::Allocator;
pub use aquifer_device::{Device, Stream};
pub use buffer::{Buffer, View, ViewMut};
pub use error::Error;
pub use followed_graph::FollowedGraph;
pub use graph::{Graph, GraphCapture, GraphPlan};
pub use open::{open, open_best};
pub use tensor::Tensor;
pub use transfer::{Pending, PinnedBuffer};

/// What programs import.
///
/// ```
/// use aquifer::prelude::*;
/// ```
pub mod prelude {
    pub use aquifer_kernels::DType;

    pub use crate::buffer::{read, with, write};
    pub use crate::{Allocator, Buffer, Device, PinnedBuffer, Stream, Tensor};
}

/// Devices and what runs on them: events, graphs, the simulator, cudarc.
pub mod device {
    #[cfg(all(feature = "cuda", target_pointer_width = "64"))]
    pub use aquifer_cuda as cuda;
    pub use aquifer_device::{
        AccessKind, AccessRange, Capture, Code, DeviceError, DeviceInfo, DevicePtr, ErrorKind, Event, Graph,
        HandleKind, HostKernel, KernelArg, KernelMemory, Launch, Operation, RawStream, RequestError, StreamFlags, Tick,
    };

    pub use crate::open::{DeviceSpec, OpenError, gpus};

    /// The simulated GPU.
    #[cfg(feature = "sim")]
    pub mod sim {
        pub use aquifer_sim::{Conditional, Fault, Preset, SimConfig, SimDriver};
    }
}

/// Memory of a device: configuration, statistics, private pools for graphs.
pub mod memory {
    pub use aquifer_allocator::config::{Backing, CrossStream};
    pub use aquifer_allocator::{
        AccessGuard, Action, Advice, AllocError, Allocation, Attribution, Config, Contents, Growable, HistoryOptions,
        KeptBy, MappingChange, MemoryStats, OomReport, Part, PoolOptions, PoolStats, PrivatePool, Registration,
        SleepOptions, Snapshot, Stat, StayingAwake, Storage, TagScope, WhySegments,
    };
}

/// The kernels that buffers and tensors use.
pub mod kernels {
    pub use aquifer_kernels::{DType, Element, KernelError, Kernels, UnknownDType};
}

/// The code of the pages for users, as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/cuda-graphs.md")]
#[doc = include_str!("../../docs/errors.md")]
#[doc = include_str!("../../docs/exporting-memory.md")]
#[doc = include_str!("../../docs/from-cudarc.md")]
#[doc = include_str!("../../docs/from-pytorch.md")]
#[doc = include_str!("../../docs/kv-cache.md")]
#[doc = include_str!("../../docs/loading-a-model.md")]
#[doc = include_str!("../../docs/options.md")]
#[doc = include_str!("../../docs/out-of-memory.md")]
#[doc = include_str!("../../docs/statistics.md")]
#[doc = include_str!("../../docs/streams.md")]
#[doc = include_str!("../../docs/testing.md")]
#[doc = include_str!("../../docs/unloading-a-model.md")]
struct Pages;
