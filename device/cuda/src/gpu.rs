//! The state of one GPU: the context to call the driver in, and the live objects and ranges. The
//! families of calls operate on it.

use std::sync::{Arc, Weak};

use aquifer_device::fork::Mutex;
use aquifer_device::{Code, DeviceError, DeviceInfo, Operation, Result};
use cudarc::driver::sys::CUdevice_attribute as Attr;

use crate::captures::Gone;
use crate::context::GpuContext;
use crate::handles::{Handles, OwnedObject};
use crate::objects::{Events, Graphs, Locked, Modules, Physicals, Source, StreamEntry};
use crate::ranges::Ranges;

/// One GPU.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) context: Arc<GpuContext>,
    pub(crate) info: DeviceInfo,
    pub(crate) facts: Facts,
    pub(crate) streams: Handles<StreamEntry>,
    /// Streams to be destroyed once cudarc's objects of them are given back.
    pub(crate) lent: Mutex<Vec<Arc<StreamEntry>>>,
    pub(crate) events: Handles<OwnedObject<Events>>,
    pub(crate) graphs: Handles<OwnedObject<Graphs>>,
    pub(crate) modules: Handles<OwnedObject<Modules>>,
    pub(crate) physicals: Handles<OwnedObject<Physicals>>,
    /// Allocated device memory.
    pub(crate) memory: Ranges<Source>,
    /// Pinned host memory.
    pub(crate) host: Ranges<Locked>,
    /// Reserved addresses.
    pub(crate) reserved: Ranges<()>,
    /// Mappings, all in reserved addresses.
    pub(crate) mapped: Ranges<()>,
    pub(crate) gone: Arc<Gone>,
    /// Held while mappings change.
    pub(crate) rules: Mutex<()>,
    /// Contexts whose memory this one asked to reach directly, with or without success.
    pub(crate) peers: Mutex<Vec<Weak<GpuContext>>>,
}

/// Capabilities of the GPU that calls ask for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) rdma: bool,
    pub(crate) posix_fd: bool,
    /// The device knows registered host memory by the host's address.
    pub(crate) registered_by_address: bool,
}

impl Gpu {
    pub(crate) fn new(context: Arc<GpuContext>, ordinal: u32) -> Result<Gpu> {
        let mut info = context.installation.info(ordinal)?;
        info.priorities = context.priorities()?;
        let can_map = info.granularity_bytes.is_some();
        let has = |attribute| {
            Ok::<_, DeviceError>(can_map && context.installation.attribute(context.device, attribute)? != 0)
        };
        let ask = |attribute| context.installation.attribute(context.device, attribute);
        let facts = Facts {
            registered_by_address: ask(Attr::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)? != 0,
            rdma: has(Attr::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?,
            posix_fd: has(Attr::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?,
        };
        Ok(Gpu {
            context,
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
            gone: Arc::default(),
            rules: Mutex::default(),
            peers: Mutex::default(),
        })
    }

    /// A function that not every driver has.
    pub(crate) fn optional<F>(&self, operation: Operation, function: Option<F>) -> Result<F> {
        function.ok_or_else(|| {
            let (major, minor) = self.context.installation.version;
            DeviceError::refused(operation, Code::NOT_SUPPORTED)
                .with_detail(format!("this driver, for CUDA {major}.{minor}, lacks the function; a newer one has it"))
        })
    }
}
