//! GPU devices, streams, events and timelines behind one [`Driver`] trait, with a deterministic simulated GPU.
//!
//! In the order in which data flows: a [`Device`] is driven by a [`Driver`]; work is enqueued on its [`Stream`]s;
//! [`Event`]s and [`Tick`]s order streams after each other. Errors of any of these are [`DeviceError`]s.
//!
//! Work that fails on a device loses it, and every later call of whatever kind fails. What the device was lost by is
//! told by [`Device::lost`], and by each of these errors; on a simulated device that is the work itself, with its
//! stream and the addresses. Errors that are about two devices name both by their [`DeviceLabel`]s.
mod capture;
mod capturing_streams;
mod context;
mod copies;
mod counted;
#[cfg(all(feature = "cuda", target_pointer_width = "64"))]
pub mod cuda;
mod device;
mod discovery;
mod driver;
mod error;
mod event;
mod external;
mod label;
mod launch;
mod launches;
mod left;
mod lost;
mod physical;
pub mod sim;
mod stream;
mod sync;
mod timeline;
mod unavailable;
mod waits;

pub use capture::{AnnouncedCapture, Capture, Graph};
pub use capturing_streams::CapturingStreams;
pub use context::Reservation;
pub use copies::{Copy2d, CopyEnd, CopyPart};
pub use counted::CallCounts;
pub use device::{Device, TimelineCounts};
pub use discovery::{Choice, DeviceSpec, Existing, OpenError, available, best_available, count, get, gpus};
pub use driver::{
    Attribute, CaptureStatus, DeviceInfo, DevicePtr, Driver, DriverKind, HostPtr, MemoryInfo, PoolUsage, RawEvent,
    RawGraph, RawModule, RawPhysical, RawStream, StreamFlags,
};
pub use error::{Code, DeviceError, ErrorKind, Operation, Result};
pub use event::Event;
pub use external::ExternalStream;
pub use label::{DeviceLabel, DeviceMismatch};
pub use launch::{Access, AccessKind, HostKernel, KernelArg, KernelMemory, Launch};
pub use launches::{LaunchOrder, Launches};
pub use physical::{HandleKind, PhysicalOptions};
pub use stream::Stream;
pub use timeline::{Clock, Tick, Timeline};
pub use unavailable::Unavailable;
pub use waits::WaitMark;
