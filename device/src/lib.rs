//! GPU devices, streams, events and timelines behind one [`Driver`] trait, with a deterministic simulated GPU.
mod driver;
mod error;
pub mod sim;

pub use driver::{
    Access, AccessKind, Attribute, CallCounts, DeviceInfo, DevicePtr, Driver, DriverKind, HostKernel, HostPtr,
    KernelArg, KernelMemory, Launch, MemoryInfo, RawEvent, RawGraph, RawPhysical, RawStream, StreamFlags,
};
pub use error::{Code, DeviceError, ErrorKind, Operation, Result};
