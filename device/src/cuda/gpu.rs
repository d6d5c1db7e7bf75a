//! The state of one GPU: the context to call the driver in, and what is alive there. The families
//! of calls operate on it.

use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute as Attr;

use super::context::Core;
use super::handles::{Handles, Object};
use super::objects::{Events, Graphs, Locked, Modules, Peers, Physicals, Source, StreamEntry};
use super::ranges::Ranges;
use crate::driver::DeviceInfo;
use crate::error::{Code, DeviceError, Operation, Result};
use crate::fork::Mutex;

/// One GPU.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) core: Arc<Core>,
    pub(super) info: DeviceInfo,
    pub(super) facts: Facts,
    pub(super) streams: Handles<StreamEntry>,
    /// Streams to be destroyed once cudarc's objects of them are given back.
    pub(super) lent: Mutex<Vec<Arc<StreamEntry>>>,
    pub(super) events: Handles<Object<Events>>,
    pub(super) graphs: Handles<Object<Graphs>>,
    pub(super) modules: Handles<Object<Modules>>,
    pub(super) physicals: Handles<Object<Physicals>>,
    /// Allocated device memory.
    pub(super) memory: Ranges<Source>,
    /// Page-locked host memory.
    pub(super) host: Ranges<Locked>,
    /// Reserved addresses.
    pub(super) reserved: Ranges<()>,
    /// Mappings, all in reserved addresses.
    pub(super) mapped: Ranges<()>,
    /// Held while mappings change.
    pub(super) rules: Mutex<()>,
    /// Devices whose memory this one was allowed to reach directly, if it can.
    pub(super) peers: Peers,
}

/// Capabilities of the GPU that calls ask for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub(super) rdma: bool,
    pub(super) posix_fd: bool,
    /// The device knows registered host memory by the host's address.
    pub(super) registered_by_address: bool,
}

impl Gpu {
    pub(super) fn new(core: Arc<Core>, ordinal: u32) -> Result<Gpu> {
        let mut info = core.installation.info(ordinal)?;
        info.priorities = core.priorities()?;
        let can_map = info.granularity_bytes.is_some();
        let has =
            |attribute| Ok::<_, DeviceError>(can_map && core.installation.attribute(core.device, attribute)? != 0);
        let ask = |attribute| core.installation.attribute(core.device, attribute);
        let facts = Facts {
            registered_by_address: ask(Attr::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)? != 0,
            rdma: has(Attr::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?,
            posix_fd: has(Attr::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?,
        };
        Ok(Gpu {
            core,
            info,
            facts,
            streams: Handles::default(),
            lent: Mutex::default(),
            events: Handles::default(),
            graphs: Handles::default(),
            modules: Handles::default(),
            physicals: Handles::default(),
            memory: Ranges::default(),
            host: Ranges::default(),
            reserved: Ranges::default(),
            mapped: Ranges::default(),
            rules: Mutex::default(),
            peers: Peers::default(),
        })
    }

    /// A function that not every driver has.
    pub(super) fn optional<F>(&self, operation: Operation, function: Option<F>) -> Result<F> {
        function.ok_or_else(|| {
            let (major, minor) = self.core.installation.version;
            DeviceError::refused(operation, Code::NOT_SUPPORTED)
                .with_detail(format!("this driver, for CUDA {major}.{minor}, lacks the function; a newer one has it"))
        })
    }
}
