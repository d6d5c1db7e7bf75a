//! GPU devices, streams, events and timelines behind one [`Driver`] trait, with a deterministic simulated GPU.
//!
//! In the order in which data flows: a [`Device`] is driven by a [`Driver`]; work is enqueued on its [`Stream`]s;
//! [`Event`]s and [`Tick`]s order streams after each other. Errors of any of these are [`DeviceError`]s.
mod capture;
mod context;
mod counted;
mod device;
mod discovery;
mod driver;
mod error;
mod event;
mod physical;
pub mod sim;
mod stream;
mod sync;
mod timeline;

pub use capture::{Capture, Graph};
pub use context::Reservation;
pub use device::{Device, TimelineCounts};
pub use discovery::{Choice, DeviceSpec, Existing, OpenError, available, best_available, count, get};
pub use driver::{
    Access, AccessKind, Attribute, CallCounts, DeviceInfo, DevicePtr, Driver, DriverKind, HostKernel, HostPtr,
    KernelArg, KernelMemory, Launch, MemoryInfo, RawEvent, RawGraph, RawPhysical, RawStream, StreamFlags,
};
pub use error::{Code, DeviceError, ErrorKind, Operation, Result};
pub use event::Event;
pub use physical::{HandleKind, PhysicalOptions};
pub use stream::{ExternalStream, Stream};
pub use timeline::{Clock, Tick, Timeline};
