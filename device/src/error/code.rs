//! Raw result codes of the driver, with their names and kinds.

/// The kind of failure that a driver code stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The device has not enough memory, or not enough in one piece. Free some, or ask for less.
    OutOfMemory,
    /// Addresses, not memory, ran out. Reserve fewer or smaller ranges.
    OutOfAddresses,
    /// The caller passed something wrong: a dead handle, a bad range, a wrong ordinal.
    InvalidUse,
    /// The work asked about has not finished. Ask again later.
    NotReady,
    /// The device or its context is gone and every later call fails too. Restart the process. The
    /// first such error of a device ([`crate::Device::lost`]) says most about why; later ones name
    /// it.
    DeviceLost,
    /// This device or driver cannot do that. Ask for the capability first.
    Unsupported,
    /// There is no usable driver or device. The message names the thing to install or set.
    Unavailable,
    /// The call is not allowed in the present state of graph capture.
    Capture,
    /// The process was forked after a device was opened, and this is the child: no device can be
    /// used in it. Fork before a device is opened, or start another program (`exec`).
    Forked,
    /// Anything else; see the raw code.
    Other,
}

/// A raw driver result code (`CUresult`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Code(pub u32);

/// The driver's codes, but for those of its profiler: value, CUDA name, kind.
///
/// Source: the `CUresult` enumeration of the CUDA driver API. A device is taken for lost where that
/// says that the process must be terminated to go on with CUDA, that the context cannot be used any
/// more, or that the hardware failed.
const CODES: &[(u32, &str, ErrorKind)] = &[
    (1, "CUDA_ERROR_INVALID_VALUE", ErrorKind::InvalidUse),
    (2, "CUDA_ERROR_OUT_OF_MEMORY", ErrorKind::OutOfMemory),
    (3, "CUDA_ERROR_NOT_INITIALIZED", ErrorKind::Unavailable),
    (4, "CUDA_ERROR_DEINITIALIZED", ErrorKind::DeviceLost),
    (34, "CUDA_ERROR_STUB_LIBRARY", ErrorKind::Unavailable),
    (36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", ErrorKind::Unsupported),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE", ErrorKind::Unavailable),
    (47, "CUDA_ERROR_MULTICAST_RESOURCE_FULL", ErrorKind::Other),
    (100, "CUDA_ERROR_NO_DEVICE", ErrorKind::Unavailable),
    (101, "CUDA_ERROR_INVALID_DEVICE", ErrorKind::InvalidUse),
    (102, "CUDA_ERROR_DEVICE_NOT_LICENSED", ErrorKind::Unavailable),
    (200, "CUDA_ERROR_INVALID_IMAGE", ErrorKind::InvalidUse),
    (201, "CUDA_ERROR_INVALID_CONTEXT", ErrorKind::InvalidUse),
    (202, "CUDA_ERROR_CONTEXT_ALREADY_CURRENT", ErrorKind::InvalidUse),
    (205, "CUDA_ERROR_MAP_FAILED", ErrorKind::Other),
    (206, "CUDA_ERROR_UNMAP_FAILED", ErrorKind::Other),
    (207, "CUDA_ERROR_ARRAY_IS_MAPPED", ErrorKind::InvalidUse),
    (208, "CUDA_ERROR_ALREADY_MAPPED", ErrorKind::InvalidUse),
    (209, "CUDA_ERROR_NO_BINARY_FOR_GPU", ErrorKind::Unsupported),
    (210, "CUDA_ERROR_ALREADY_ACQUIRED", ErrorKind::InvalidUse),
    (211, "CUDA_ERROR_NOT_MAPPED", ErrorKind::InvalidUse),
    (212, "CUDA_ERROR_NOT_MAPPED_AS_ARRAY", ErrorKind::InvalidUse),
    (213, "CUDA_ERROR_NOT_MAPPED_AS_POINTER", ErrorKind::InvalidUse),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE", ErrorKind::DeviceLost),
    (215, "CUDA_ERROR_UNSUPPORTED_LIMIT", ErrorKind::Unsupported),
    (216, "CUDA_ERROR_CONTEXT_ALREADY_IN_USE", ErrorKind::InvalidUse),
    (217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", ErrorKind::Unsupported),
    (218, "CUDA_ERROR_INVALID_PTX", ErrorKind::InvalidUse),
    (219, "CUDA_ERROR_INVALID_GRAPHICS_CONTEXT", ErrorKind::InvalidUse),
    (220, "CUDA_ERROR_NVLINK_UNCORRECTABLE", ErrorKind::DeviceLost),
    (221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", ErrorKind::Unsupported),
    (222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", ErrorKind::Unsupported),
    (223, "CUDA_ERROR_JIT_COMPILATION_DISABLED", ErrorKind::Unsupported),
    (224, "CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY", ErrorKind::Unsupported),
    (225, "CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC", ErrorKind::Unsupported),
    (226, "CUDA_ERROR_CONTAINED", ErrorKind::DeviceLost),
    (227, "CUDA_ERROR_INSUFFICIENT_LOADER_VERSION", ErrorKind::Unsupported),
    (300, "CUDA_ERROR_INVALID_SOURCE", ErrorKind::InvalidUse),
    (301, "CUDA_ERROR_FILE_NOT_FOUND", ErrorKind::InvalidUse),
    (302, "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", ErrorKind::Other),
    (303, "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", ErrorKind::Other),
    (304, "CUDA_ERROR_OPERATING_SYSTEM", ErrorKind::Other),
    (400, "CUDA_ERROR_INVALID_HANDLE", ErrorKind::InvalidUse),
    (401, "CUDA_ERROR_ILLEGAL_STATE", ErrorKind::InvalidUse),
    (402, "CUDA_ERROR_LOSSY_QUERY", ErrorKind::Other),
    (500, "CUDA_ERROR_NOT_FOUND", ErrorKind::InvalidUse),
    (600, "CUDA_ERROR_NOT_READY", ErrorKind::NotReady),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS", ErrorKind::DeviceLost),
    (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", ErrorKind::InvalidUse),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT", ErrorKind::DeviceLost),
    (703, "CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING", ErrorKind::InvalidUse),
    (704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", ErrorKind::InvalidUse),
    (705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", ErrorKind::InvalidUse),
    (708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", ErrorKind::InvalidUse),
    (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", ErrorKind::DeviceLost),
    (710, "CUDA_ERROR_ASSERT", ErrorKind::DeviceLost),
    (711, "CUDA_ERROR_TOO_MANY_PEERS", ErrorKind::Other),
    (712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", ErrorKind::InvalidUse),
    (713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", ErrorKind::InvalidUse),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR", ErrorKind::DeviceLost),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", ErrorKind::DeviceLost),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS", ErrorKind::DeviceLost),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", ErrorKind::DeviceLost),
    (718, "CUDA_ERROR_INVALID_PC", ErrorKind::DeviceLost),
    (719, "CUDA_ERROR_LAUNCH_FAILED", ErrorKind::DeviceLost),
    (720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", ErrorKind::InvalidUse),
    (721, "CUDA_ERROR_TENSOR_MEMORY_LEAK", ErrorKind::DeviceLost),
    (800, "CUDA_ERROR_NOT_PERMITTED", ErrorKind::InvalidUse),
    (801, "CUDA_ERROR_NOT_SUPPORTED", ErrorKind::Unsupported),
    (802, "CUDA_ERROR_SYSTEM_NOT_READY", ErrorKind::Unavailable),
    (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", ErrorKind::Unavailable),
    (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", ErrorKind::Unavailable),
    (805, "CUDA_ERROR_MPS_CONNECTION_FAILED", ErrorKind::Unavailable),
    (806, "CUDA_ERROR_MPS_RPC_FAILURE", ErrorKind::Unavailable),
    (807, "CUDA_ERROR_MPS_SERVER_NOT_READY", ErrorKind::Unavailable),
    (808, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", ErrorKind::Unavailable),
    (809, "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", ErrorKind::Unavailable),
    (810, "CUDA_ERROR_MPS_CLIENT_TERMINATED", ErrorKind::DeviceLost),
    (811, "CUDA_ERROR_CDP_NOT_SUPPORTED", ErrorKind::Unsupported),
    (812, "CUDA_ERROR_CDP_VERSION_MISMATCH", ErrorKind::Unsupported),
    (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", ErrorKind::Capture),
    (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", ErrorKind::Capture),
    (902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", ErrorKind::Capture),
    (903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", ErrorKind::Capture),
    (904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", ErrorKind::Capture),
    (905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", ErrorKind::Capture),
    (906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", ErrorKind::Capture),
    (907, "CUDA_ERROR_CAPTURED_EVENT", ErrorKind::Capture),
    (908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", ErrorKind::Capture),
    (909, "CUDA_ERROR_TIMEOUT", ErrorKind::Other),
    (910, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", ErrorKind::InvalidUse),
    (911, "CUDA_ERROR_EXTERNAL_DEVICE", ErrorKind::DeviceLost),
    (912, "CUDA_ERROR_INVALID_CLUSTER_SIZE", ErrorKind::InvalidUse),
    (913, "CUDA_ERROR_FUNCTION_NOT_LOADED", ErrorKind::InvalidUse),
    (914, "CUDA_ERROR_INVALID_RESOURCE_TYPE", ErrorKind::InvalidUse),
    (915, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", ErrorKind::InvalidUse),
    (916, "CUDA_ERROR_KEY_ROTATION", ErrorKind::Other),
    (917, "CUDA_ERROR_STREAM_DETACHED", ErrorKind::InvalidUse),
    (918, "CUDA_ERROR_GRAPH_RECAPTURE_FAILURE", ErrorKind::InvalidUse),
    (919, "CUDA_ERROR_FABRIC_NOT_READY", ErrorKind::Unavailable),
    (999, "CUDA_ERROR_UNKNOWN", ErrorKind::Other),
];

impl Code {
    /// An argument is out of range or inconsistent.
    pub const INVALID_VALUE: Code = Code(1);
    /// The device has not enough memory.
    pub const OUT_OF_MEMORY: Code = Code(2);
    /// There is no such device.
    pub const NO_DEVICE: Code = Code(100);
    /// The ordinal names no device.
    pub const INVALID_DEVICE: Code = Code(101);
    /// A stream, event, pointer or physical handle is not live.
    pub const INVALID_HANDLE: Code = Code(400);
    /// The work asked about has not finished.
    pub const NOT_READY: Code = Code(600);
    /// The device touched memory that is not there; the context is lost.
    pub const ILLEGAL_ADDRESS: Code = Code(700);
    /// A kernel failed; the context is lost.
    pub const LAUNCH_FAILED: Code = Code(719);
    /// The call is not allowed now.
    pub const NOT_PERMITTED: Code = Code(800);
    /// The device cannot do this.
    pub const NOT_SUPPORTED: Code = Code(801);
    /// The call is not allowed while a stream is capturing.
    pub const CAPTURE_UNSUPPORTED: Code = Code(900);
    /// The capture was broken by an earlier call.
    pub const CAPTURE_INVALIDATED: Code = Code(901);
    /// The capture cannot end: other streams joined it and did not join back.
    pub const CAPTURE_UNJOINED: Code = Code(904);
    /// An uncaptured dependency inside a capture.
    pub const CAPTURE_ISOLATION: Code = Code(905);
    /// The legacy stream would have to synchronise with a capturing stream.
    pub const CAPTURE_IMPLICIT: Code = Code(906);
    /// The event was recorded inside a capture and can only be waited on there.
    pub const CAPTURED_EVENT: Code = Code(907);

    /// The CUDA name of the code, or `"CUDA_ERROR_(unlisted)"`.
    pub fn name(self) -> &'static str {
        self.entry().map_or("CUDA_ERROR_(unlisted)", |&(_, name, _)| name)
    }

    /// The code with the given CUDA name; the prefix `CUDA_ERROR_` and case are optional.
    ///
    /// ```
    /// use aquifer::device::Code;
    /// assert_eq!(Code::from_name("out_of_memory"), Some(Code::OUT_OF_MEMORY));
    /// assert_eq!(Code::from_name("CUDA_ERROR_UNKNOWN"), Some(Code(999)));
    /// ```
    pub fn from_name(name: &str) -> Option<Code> {
        let upper = name.to_ascii_uppercase();
        let short = upper.strip_prefix("CUDA_ERROR_").unwrap_or(&upper);
        let matches = |listed: &str| listed.strip_prefix("CUDA_ERROR_") == Some(short);
        CODES.iter().find(|(_, listed, _)| matches(listed)).map(|&(code, ..)| Code(code))
    }

    /// What kind of failure the code stands for.
    pub fn kind(self) -> ErrorKind {
        self.entry().map_or(ErrorKind::Other, |&(_, _, kind)| kind)
    }

    fn entry(self) -> Option<&'static (u32, &'static str, ErrorKind)> {
        CODES.iter().find(|(code, ..)| *code == self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_found_by_name() {
        for (index, &(code, name, kind)) in CODES.iter().enumerate() {
            assert!(CODES[..index].iter().all(|(other, ..)| *other != code), "{code} listed twice");
            assert_eq!(Code::from_name(name), Some(Code(code)));
            assert_eq!(Code(code).kind(), kind);
        }
        // Those of which CUDA says that the process must be terminated.
        let lost = [226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810];
        assert!(lost.iter().all(|&code| Code(code).kind() == ErrorKind::DeviceLost));
        assert_eq!(Code(12345).name(), "CUDA_ERROR_(unlisted)");
        assert_eq!(Code(12345).kind(), ErrorKind::Other);
    }
}
