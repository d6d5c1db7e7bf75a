//! Real GPUs through NVIDIA's CUDA driver, which is loaded when it is first asked for.
//!
//! Building needs no toolkit and running no more than the display driver; without it, everything
//! here fails with an error that names the missing part. [`CudaDriver`] implements
//! [`Driver`](aquifer_device::Driver); [`shared`] opens the device of a GPU, and [`device_of`],
//! [`context_of`], [`stream()`] and [`stream_of`] hand devices and streams to and from cudarc.
//!
//! * **Loading**: `library` finds the driver, `functions` its functions by name, `installation`
//!   starts it and asks it for GPUs. A function that is missing turns its capability off, or is an
//!   error before anything is called.
//! * **Calling**: `context` makes the context current for the length of a call. `handles` and
//!   `ranges` list the live objects and memory, because the driver does not check its arguments;
//!   `raw` has handles and sizes, `shapes` structures as the driver takes them.
//! * **State**: `objects` describes each kind of object, `gpu` holds the tables of a GPU, and
//!   `driver` implements the trait on top.
//! * **Families of calls** are functions on a `Gpu`: `memory`, `mappings`, `streams`, `events`,
//!   `copies`, `peers`, `modules`, `captures`.
//!   `nvml` asks NVIDIA's management library which process holds how much memory.
//!   `context_state` is the state that all drivers of a context share: its device and its captures.
//!
//! Errors carry the driver's raw code. An error of work that failed on the GPU surfaces at a later
//! call and is of kind [`DeviceLost`](aquifer_device::ErrorKind::DeviceLost): the context takes no
//! calls of any library any more.
//!
//! Unsafe code calls the driver (invariants F1 in `functions`, C1 in `context`, L1 in `handles`)
//! and passes promises on.

mod captures;
mod context;
mod context_state;
mod copies;
mod driver;
mod events;
mod functions;
mod gpu;
mod handles;
mod host_memory;
mod installation;
mod interop;
mod library;
mod mappings;
mod memory;
mod modules;
#[cfg(feature = "nvml")]
mod nvml;
mod objects;
mod peers;
mod ranges;
mod raw;
mod shapes;
mod streams;
mod unavailable;

pub use driver::CudaDriver;
pub use installation::visible_devices;
pub use interop::{context_of, device_of, forget_stream, shared, stream, stream_of};
pub use library::set_library;
pub use unavailable::Unavailable;

use aquifer_device::{DeviceError, DeviceInfo};
use installation::Installation;

/// [`DeviceInfo::kind`] of GPUs that the CUDA driver drives.
pub const KIND: &str = "cuda";

/// Properties of the GPUs that can be used, or why none can. No GPU is opened for it, so stream
/// priorities are not included.
///
/// # Errors
/// When there is no driver, it does not work, or it shows no GPU.
pub fn gpus() -> Result<Vec<DeviceInfo>, Unavailable> {
    let installation = Installation::find()?;
    let failed = |error: DeviceError| Unavailable::Failed { code: error.code };
    let count = installation.count().map_err(failed)?;
    (0..count).map(|ordinal| installation.info(ordinal)).collect::<Result<_, _>>().map_err(failed)
}
