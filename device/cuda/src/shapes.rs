//! Structures of the driver's interface whose bindings differ between versions of CUDA.
//!
//! The layouts are those of `cuda.h`; a test compares them with the bindings. Their memory has been
//! the same in every version: only its spelling in C changed (a union around `id`, names).

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use aquifer_device::{HandleKind, PhysicalOptions};

/// `CUmemLocation`: where memory is.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Location {
    kind: c_uint,
    id: c_int,
}

impl Location {
    /// `CU_MEM_LOCATION_TYPE_DEVICE`.
    pub(crate) fn device(ordinal: c_int) -> Location {
        Location { kind: 1, id: ordinal }
    }

    /// `CU_MEM_LOCATION_TYPE_INVALID`: no hint.
    pub(crate) fn none() -> Location {
        Location { kind: 0, id: 0 }
    }
}

/// `CUmemAllocationProp`: the purpose of physical memory.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct AllocationProperties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    win32_metadata: *mut c_void,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

impl AllocationProperties {
    /// `CU_MEM_ALLOCATION_TYPE_PINNED` memory of a device.
    pub(crate) fn new(ordinal: c_int, options: PhysicalOptions) -> AllocationProperties {
        let handle_types = match options.exportable {
            None => 0,
            // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            Some(HandleKind::PosixFd) => 1,
        };
        AllocationProperties {
            kind: 1,
            handle_types,
            location: Location::device(ordinal),
            win32_metadata: ptr::null_mut(),
            compression: 0,
            rdma: options.rdma.into(),
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// `CUmemAccessDesc`: which devices may touch mapped memory.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct AccessDescription {
    location: Location,
    flags: c_uint,
}

impl AccessDescription {
    /// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE` for a device.
    pub(crate) fn read_write(ordinal: c_int) -> AccessDescription {
        AccessDescription { location: Location::device(ordinal), flags: 3 }
    }
}

/// `CUmemcpyAttributes`: how the copies of a batch are made.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct CopyAttributes {
    source_access: c_uint,
    source: Location,
    destination: Location,
    flags: c_uint,
}

impl CopyAttributes {
    /// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: the source is read in the order of the stream.
    pub(crate) fn in_stream_order() -> CopyAttributes {
        CopyAttributes { source_access: 1, source: Location::none(), destination: Location::none(), flags: 0 }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use cudarc::driver::sys;

    use super::*;

    macro_rules! same_layout {
        ($ours:ty, $theirs:ty, $($field:ident = $name:ident),*) => {
            assert_eq!(size_of::<$ours>(), size_of::<$theirs>());
            assert_eq!(align_of::<$ours>(), align_of::<$theirs>());
            $(assert_eq!(offset_of!($ours, $field), offset_of!($theirs, $name), stringify!($name));)*
        };
    }

    #[test]
    fn layouts_are_those_of_the_bindings() {
        assert_eq!(size_of::<Location>(), size_of::<sys::CUmemLocation>());
        assert_eq!(offset_of!(Location, kind), offset_of!(sys::CUmemLocation, type_));
        same_layout!(
            AllocationProperties,
            sys::CUmemAllocationProp,
            kind = type_,
            handle_types = requestedHandleTypes,
            location = location,
            win32_metadata = win32HandleMetaData,
            compression = allocFlags
        );
        assert_eq!(offset_of!(sys::CUmemAllocationProp_st__bindgen_ty_1, gpuDirectRDMACapable), 1);
        assert_eq!(offset_of!(AllocationProperties, rdma) - offset_of!(AllocationProperties, compression), 1);
        same_layout!(AccessDescription, sys::CUmemAccessDesc, location = location, flags = flags);
        // Bindings before CUDA 12.8 lack this one: an enumeration, two locations, flags.
        assert_eq!(size_of::<CopyAttributes>(), 2 * size_of::<c_uint>() + 2 * size_of::<Location>());
    }
}
