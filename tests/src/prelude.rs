//! What most tests use, for a glob import.

pub use std::sync::{Arc, Mutex};
pub use std::time::Duration;

pub use aquifer::buffer::Handle;
pub use aquifer::{Allocator, Buffer};
pub use aquifer_allocator::config::Backing;
pub use aquifer_allocator::{
    AccessGuard, Action, Advice, AllocError, Allocation, Config, Contents, Exportable, Growable, MappingChange,
    MemoryStats, OomReport, Part, PinnedMapping, PoolOptions, PrivatePool, Refusal, Registration, Reservation,
    SleepOptions, TagScope,
};
pub use aquifer_device::{
    AccessKind, AccessRange, Code, Device, DeviceError, DevicePtr, ErrorKind, HandleKind, Operation, RequestError,
    Stream, StreamFlags, Tick,
};
pub use aquifer_sim::{Fault, SimConfig};

pub use crate::{At, BACKINGS, Bench, GIB, KIB, MIB, Subject, check, on, random, runner, write_on};
