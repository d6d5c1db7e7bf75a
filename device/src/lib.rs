//! GPU devices, streams, events and timelines behind one [`Driver`] trait.
//!
//! * A [`Device`] is one GPU, accessed through a [`Driver`]: NVIDIA's, of the crate `aquifer-cuda`,
//!   or the simulator's, of `aquifer-sim`. Nothing here knows which. The crate `aquifer` opens
//!   devices by name.
//! * A driver that checks programs has a [`Witness`], which the layers above tell what they do.
//! * Work is enqueued on the device's [`Stream`]s. Work on one stream runs in order; different
//!   streams are independent.
//! * A [`Tick`] stands for everything enqueued on a stream so far. [`Stream::wait_for`] orders one
//!   stream after a tick of another one, with at most one event and one wait. [`Event`]s, which can
//!   also measure time, do the same explicitly.
//! * A [`Capture`] records a stream's work into a [`Graph`] instead of running it.
//!
//! ```
//! let device = aquifer::open("sim:24GiB")?;
//! let (producer, consumer) = (device.stream()?, device.stream()?);
//! let ptr = device.alloc(1 << 20)?;
//! producer.fill(ptr, 7, 1 << 20)?;
//! consumer.wait_for(&producer.tick())?; // on the device; the host does not wait
//! let mut bytes = [0; 4];
//! consumer.download_blocking(&mut bytes, ptr)?;
//! assert_eq!(bytes, [7; 4]);
//! # device.free(ptr)?;
//! # Ok::<(), aquifer::Error>(())
//! ```
//!
//! # Testing
//!
//! A simulated device finds races, and misuse of memory that allocators hand out
//! (`aquifer-allocator`); the crate `aquifer-sim` says which. A test either asks for them with
//! [`Device::assert_no_violations`], or opens its device with `violations=panic`. Then a wrong
//! address or length panics in the call that enqueues the work, and a race in the next wait, or
//! when the last handle of the device is dropped. The text names both places in the program, and
//! the remedy.
//!
//! ```should_panic
//! let device = aquifer::open("sim:24GiB,violations=panic")?;
//! let (producer, consumer) = (device.stream()?, device.stream()?);
//! let ptr = device.alloc(1 << 20)?;
//! producer.fill(ptr, 7, 1 << 20)?;
//! consumer.download_blocking(&mut [0; 4], ptr)?; // panics: `consumer.wait_for(&producer.tick())` is missing
//! # Ok::<(), aquifer::Error>(())
//! ```
//!
//! # Errors
//!
//! All errors of these types are [`DeviceError`]s. When work fails on a device, the device is
//! *lost*: every later call fails. [`Device::lost`], and each of these later errors, say by which
//! error the device was lost. On a simulated device that error names the work that failed, its
//! stream and the addresses. Errors about two devices name both by their [`DeviceLabel`]s.
mod capture;
mod capturing_streams;
mod context;
mod copies;
mod counted;
mod device;
mod driver;
mod error;
mod event;
#[doc(hidden)]
pub mod executor;
mod external;
pub mod fork;
mod host_buffer;
mod label;
mod launch;
mod launches;
mod peer;
mod physical;
mod release;
mod stream;
mod stream_map;
mod stream_table;
mod sync;
mod thread_end;
mod timeline;
mod unfinished;
mod waits;
mod witness;

pub use capture::{AnnouncedCapture, Capture, Graph};
pub use capturing_streams::CapturingStreams;
pub use copies::{Copy2d, CopyEnd, CopyPart};
pub use counted::CallCounts;
pub use device::{Device, TimelineCounts};
pub use driver::{
    Attribute, CaptureStatus, DeviceInfo, DevicePtr, Driver, HostPtr, MemoryInfo, MemoryUsers, PoolUsage,
    ProcessMemory, RawEvent, RawGraph, RawModule, RawPhysical, RawStream, StreamFlags,
};
pub use error::{Attempt, Code, DeviceError, ErrorKind, Operation, RequestError, Result};
pub use event::Event;
pub use external::ExternalStream;
pub use host_buffer::HostBuffer;
pub use label::{DeviceLabel, DeviceMismatch};
pub use launch::{AccessKind, AccessRange, HostKernel, KernelArg, KernelMemory, Launch};
pub use physical::{HandleKind, PhysicalOptions};
pub use release::Reservation;
pub use stream::Stream;
pub use timeline::Tick;
pub use witness::{NewBlock, Witness};

/// For the other crates of Aquifer. It may change in any release.
#[doc(hidden)]
pub mod internal {
    pub use crate::copies::{Touched, first_overlap};
    pub use crate::counted::on_loss;
    pub use crate::device::WeakDevice;
    pub use crate::launches::{LaunchOrder, Launches};
    pub use crate::stream_map::StreamMap;
    pub use crate::thread_end::RunningThread;
    pub use crate::timeline::{CapturesHeldOff, ExpectedWork, Timeline, enqueues_expected_work, while_held};
    pub use crate::unfinished::{drop_left, finish_all};
    pub use crate::waits::WaitMark;
    pub use crate::witness::{
        CalledFrom, Caller, MovesContents, caller, defer_panics_here, last_caller, may_panic, moves_contents,
    };
}
