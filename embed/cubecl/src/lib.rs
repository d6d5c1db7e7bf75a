//! CubeCL's memory management on GPU memory from Aquifer.
//!
//! CubeCL takes memory from a *storage* and manages it in pools of its own. [`AquiferStorage`] is
//! such a storage. CubeCL's runtimes choose theirs themselves, so it is for servers that build
//! their own [`MemoryManagement`].
//!
//! ```
//! use std::sync::Arc;
//!
//! use aquifer::prelude::*;
//! use aquifer_cubecl::AquiferStorage;
//! use cubecl_server::logging::ServerLogger;
//! use cubecl_server::memory_management::{
//!     ErrorGraph, MemoryAllocationMode, MemoryConfiguration, MemoryManagement, MemoryManagementOptions, PageUpdate,
//! };
//!
//! let device = aquifer::open("sim:8GiB")?;
//! let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
//! let properties = cubecl_ir::MemoryDeviceProperties::new(2 << 30, 512);
//! let mut managed = MemoryManagement::from_configuration(
//!     AquiferStorage::new(&memory, &stream),
//!     &properties,
//!     MemoryConfiguration::Adaptive,
//!     Arc::new(ServerLogger::default()),
//!     MemoryManagementOptions::new("main"),
//! );
//! managed.mode(MemoryAllocationMode::Dedicated); // Aquifer pools; a second layer of pools would only hold more
//! let handle = managed.reserve(1 << 20, PageUpdate::Allow, &mut ErrorGraph::default()).expect("there is room");
//! let resource = managed.get_resource(handle.binding(), None, None).expect("it was just reserved");
//! assert_eq!((resource.size, memory.memory_allocated()), (1 << 20, 1 << 20));
//! # Ok::<(), aquifer::Error>(())
//! ```
//!
//! # Which mode
//!
//! `MemoryAllocationMode::Dedicated` gives each request memory of its own from Aquifer, which
//! reuses, splits and moves it. The other modes reserve pages and keep them. The README has
//! figures.
//!
//! # Errors
//!
//! CubeCL's error for memory that ran out has no room for Aquifer's report;
//! [`AquiferStorage::last_error`] keeps it.
//!
//! [`MemoryManagement`]: cubecl_server::memory_management::MemoryManagement

use std::collections::HashMap;
use std::fmt;

use aquifer::{Allocator, Stream};
use aquifer::memory::{AllocError, Allocation};
use cubecl_environment::backtrace::BackTrace;
use cubecl_server::server::IoError;
use cubecl_server::storage::{ComputeStorage, StorageHandle, StorageId, StorageUtilization};

/// Every address is a multiple of this.
const ALIGNMENT: usize = 512;

/// A storage of CubeCL's that takes memory from an allocator of Aquifer's, for one stream.
///
/// Memory that CubeCL deallocates goes back at the next flush, in the order of the stream. CubeCL
/// orders the other streams that use it.
pub struct AquiferStorage {
    allocator: Allocator,
    stream: Stream,
    live: HashMap<StorageId, Allocation>,
    deallocated: Vec<StorageId>,
    last_error: Option<AllocError>,
}

impl AquiferStorage {
    /// A storage of memory for work on `stream`.
    pub fn new(allocator: &Allocator, stream: &Stream) -> AquiferStorage {
        let (live, deallocated) = (HashMap::new(), Vec::new());
        AquiferStorage { allocator: allocator.clone(), stream: stream.clone(), live, deallocated, last_error: None }
    }

    /// The error of the last request that was refused, with its report if memory ran out.
    pub fn last_error(&self) -> Option<&AllocError> {
        self.last_error.as_ref()
    }
}

impl fmt::Debug for AquiferStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AquiferStorage").field("live", &self.live.len()).finish_non_exhaustive()
    }
}

/// A part of a storage's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resource {
    /// Its first address on the device.
    pub ptr: u64,
    /// Its bytes.
    pub size: u64,
}

impl ComputeStorage for AquiferStorage {
    type Resource = Resource;

    fn alignment(&self) -> usize {
        ALIGNMENT
    }

    fn get(&mut self, handle: &StorageHandle) -> Result<Resource, IoError> {
        let memory = self.live.get(&handle.id).ok_or_else(|| IoError::StorageHandleNotFound {
            reason: format!("{} is no memory of this storage", handle.id).into(),
            backtrace: BackTrace::capture(),
        })?;
        Ok(Resource { ptr: memory.ptr().0 + handle.offset(), size: handle.size() })
    }

    #[track_caller]
    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        let memory = self.allocator.alloc_bytes(size, &self.stream).map_err(|error| {
            let backtrace = BackTrace::capture();
            let told = match &error {
                AllocError::TooLarge { requested } => IoError::BufferTooBig { size: *requested, backtrace },
                error if error.is_out_of_memory() => IoError::OutOfMemory { size, backtrace },
                error => IoError::Unknown { description: error.to_string(), backtrace },
            };
            self.last_error = Some(error);
            told
        })?;
        let id = StorageId::new();
        self.live.insert(id, memory);
        Ok(StorageHandle::new(id, StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, id: StorageId) {
        self.deallocated.push(id);
    }

    fn flush(&mut self) {
        for id in self.deallocated.drain(..) {
            self.live.remove(&id);
        }
    }

    fn bytes_allocated(&self) -> u64 {
        self.live.values().map(Allocation::bytes).sum()
    }
}
