//! What physical memory can be created for, beyond being mapped on its own device.

/// How another process or device driver takes hold of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HandleKind {
    /// A POSIX file descriptor (`CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`).
    PosixFd,
}

/// Properties of physical memory, settled when it is created. By default none.
///
/// ```
/// use aquifer_device::{HandleKind, PhysicalOptions};
/// let options = PhysicalOptions::default().rdma(true).exportable(HandleKind::PosixFd);
/// assert!(options.rdma && options.exportable == Some(HandleKind::PosixFd));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PhysicalOptions {
    /// Network cards may read and write it (`gpuDirectRDMACapable`). Ask
    /// [`crate::Attribute::GpuDirectRdmaWithVmm`] first: elsewhere the memory is refused.
    pub rdma: bool,
    /// It can be exported as a handle of this kind. Ask [`crate::Attribute::PosixFdHandles`] first:
    /// elsewhere the memory is refused.
    pub exportable: Option<HandleKind>,
}

impl PhysicalOptions {
    /// Sets [`PhysicalOptions::rdma`].
    #[must_use]
    pub const fn rdma(mut self, rdma: bool) -> Self {
        self.rdma = rdma;
        self
    }

    /// Sets [`PhysicalOptions::exportable`].
    #[must_use]
    pub const fn exportable(mut self, kind: HandleKind) -> Self {
        self.exportable = Some(kind);
        self
    }
}
