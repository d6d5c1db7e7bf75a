//! The driver's functions, found by name once: the required ones, and the optional ones.
//!
//! Calls go through this table and not through the functions of cudarc's `sys`, whose types they
//! are made of, for three reasons. `sys` returns a Rust enumeration of the result codes that its
//! version of CUDA knows, and receiving one that a newer driver added would be undefined behaviour;
//! here a result is a number. `sys` panics at the first call of a function that the driver lacks;
//! here that is known beforehand. And which functions `sys` has, and in which shape, depends on the
//! version of CUDA that some crate in the program chose; here it does not.
//!
//! Invariant F1: a function of the table was found under its name in a CUDA driver, and the name
//! belongs to exactly one signature for ever: drivers give a function that changes a new name
//! (`_v2`). So calling it with arguments of these types is sound as far as the arguments themselves
//! are.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUgraphNode,
    CUmemGenericAllocationHandle, CUmemoryPool, CUmodule, CUstream, CUuserObject,
};
use libloading::Library;

use crate::shapes::{AccessDescription, AllocationProperties, CopyAttributes};

/// The functions that cudarc calls in addition when its object of a context is made and dropped. It
/// must be there, because cudarc would panic.
pub(crate) const CALLED_BY_CUDARC: [&str; 1] = ["cuCtxSetCurrent"];

macro_rules! functions {
    (
        required { $( $name:ident($($arg:ty),* $(,)?); )* }
        optional { $( $extra:ident($($extra_arg:ty),* $(,)?); )* }
    ) => {
        /// The driver's functions under their own names.
        #[allow(non_snake_case, reason = "the names are the driver's")]
        #[cfg_attr(not(feature = "nvml"), allow(dead_code, reason = "NVML alone needs the id of a GPU"))]
        pub(crate) struct Functions {
            $( pub(crate) $name: unsafe extern "C" fn($($arg),*) -> u32, )*
            $( pub(crate) $extra: Option<unsafe extern "C" fn($($extra_arg),*) -> u32>, )*
        }

        impl Functions {
            /// Names of the functions of the table without which nothing works.
            pub(crate) const REQUIRED: &[&str] = &[$(stringify!($name)),*];
            /// Names of the functions whose absence turns a capability off.
            pub(crate) const OPTIONAL: &[&str] = &[$(stringify!($extra)),*];

            /// Finds the functions, those in `without` taken as missing. The error is the name of a
            /// required one that is.
            pub(crate) fn find(library: &Library, without: &[&str]) -> Result<Functions, &'static str> {
                for name in CALLED_BY_CUDARC {
                    // SAFETY: the name belongs to this signature (F1).
                    let found: Option<unsafe extern "C" fn(CUcontext) -> u32> = unsafe { find(library, name, without) };
                    found.ok_or(name)?;
                }
                Ok(Functions {
                    $( $name: {
                        // SAFETY: the name belongs to this signature (F1).
                        let found = unsafe { find(library, stringify!($name), without) };
                        found.ok_or(stringify!($name))?
                    }, )*
                    // SAFETY: the name belongs to this signature (F1).
                    $( $extra: unsafe { find(library, stringify!($extra), without) }, )*
                })
            }
        }

        #[cfg(test)]
        mod signatures {
            use super::tests::{Shape, Signature};
            use super::*;

            /// Shapes of the required functions here and in cudarc.
            pub(crate) fn required() -> Vec<(&'static str, Signature, Signature)> {
                vec![$( (
                    stringify!($name),
                    <unsafe extern "C" fn($($arg),*) -> u32 as Shape>::SIGNATURE,
                    super::tests::signature(cudarc::driver::sys::$name as unsafe fn($(functions!(@any $arg)),*) -> _),
                ) ),*]
            }
        }
    };
    (@any $arg:ty) => { _ };
}

functions! {
    required {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut CUdevice, c_int);
        cuDeviceGetName(*mut c_char, c_int, CUdevice);
        cuDeviceTotalMem_v2(*mut usize, CUdevice);
        cuDeviceGetAttribute(*mut c_int, c_uint, CUdevice);
        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease_v2(CUdevice);
        cuCtxGetCurrent(*mut CUcontext);
        cuCtxPushCurrent_v2(CUcontext);
        cuCtxPopCurrent_v2(*mut CUcontext);
        cuCtxSynchronize();
        cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
        cuThreadExchangeStreamCaptureMode(*mut c_uint);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemAlloc_v2(*mut CUdeviceptr, usize);
        cuMemFree_v2(CUdeviceptr);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
        cuStreamDestroy_v2(CUstream);
        cuStreamSynchronize(CUstream);
        cuStreamQuery(CUstream);
        cuStreamWaitEvent(CUstream, CUevent, c_uint);
        cuStreamIsCapturing(CUstream, *mut c_uint);
        cuEventCreate(*mut CUevent, c_uint);
        cuEventDestroy_v2(CUevent);
        cuEventRecord(CUevent, CUstream);
        cuEventQuery(CUevent);
        cuEventSynchronize(CUevent);
        cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
        cuModuleLoadData(*mut CUmodule, *const c_void);
        cuModuleUnload(CUmodule);
        cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void,
            *mut *mut c_void,
        );
    }
    optional {
        cuDeviceGetUuid_v2(*mut [u8; 16], CUdevice);
        cuEventElapsedTime(*mut f32, CUevent, CUevent);
        cuMemAllocAsync(*mut CUdeviceptr, usize, CUstream);
        cuMemFreeAsync(CUdeviceptr, CUstream);
        cuDeviceGetMemPool(*mut CUmemoryPool, CUdevice);
        cuMemPoolGetAttribute(CUmemoryPool, c_uint, *mut c_void);
        cuMemPoolTrimTo(CUmemoryPool, usize);
        cuDeviceGraphMemTrim(CUdevice);
        cuDeviceGetGraphMemAttribute(CUdevice, c_uint, *mut c_void);
        cuMemGetAllocationGranularity(*mut usize, *const AllocationProperties, c_uint);
        cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
        cuMemAddressFree(CUdeviceptr, usize);
        cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const AllocationProperties, c_ulonglong);
        cuMemRelease(CUmemGenericAllocationHandle);
        cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
        cuMemUnmap(CUdeviceptr, usize);
        cuMemSetAccess(CUdeviceptr, usize, *const AccessDescription, usize);
        cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
        cuPointerGetAttribute(*mut c_void, c_uint, CUdeviceptr);
        cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostUnregister(*mut c_void);
        cuMemcpy2DAsync_v2(*const CUDA_MEMCPY2D, CUstream);
        cuMemcpyPeerAsync(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, usize, CUstream);
        cuCtxEnablePeerAccess(CUcontext, c_uint);
        cuMemcpyBatchAsync(
            *mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut CopyAttributes, *mut usize, usize, *mut usize,
            CUstream,
        );
        cuMemcpyBatchAsync_v2(
            *mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut CopyAttributes, *mut usize, usize, CUstream,
        );
        cuFuncSetAttribute(CUfunction, c_uint, c_int);
        cuStreamGetId(CUstream, *mut c_ulonglong);
        cuStreamGetCaptureInfo_v2(
            CUstream, *mut c_uint, *mut c_ulonglong, *mut CUgraph, *mut *const CUgraphNode, *mut usize,
        );
        cuStreamBeginCapture_v2(CUstream, c_uint);
        cuStreamEndCapture(CUstream, *mut CUgraph);
        cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong);
        cuGraphLaunch(CUgraphExec, CUstream);
        cuGraphExecDestroy(CUgraphExec);
        cuGraphDestroy(CUgraph);
        cuUserObjectCreate(*mut CUuserObject, *mut c_void, unsafe extern "C" fn(*mut c_void), c_uint, c_uint);
        cuUserObjectRelease(CUuserObject, c_uint);
        cuGraphRetainUserObject(CUgraph, CUuserObject, c_uint, c_uint);
    }
}

/// The function with the given name, unless it is one of those taken as missing.
///
/// # Safety
/// `F` must be the type of a pointer to that function.
unsafe fn find<F: Copy>(library: &Library, name: &str, without: &[&str]) -> Option<F> {
    if without.contains(&name) {
        return None;
    }
    // SAFETY: the caller knows the function's type.
    unsafe { library.get::<F>(name) }.ok().map(|symbol| *symbol)
}

impl Functions {
    /// Whether everything is there that mapping memory takes.
    pub(crate) fn can_map(&self) -> bool {
        self.cuMemGetAllocationGranularity.is_some()
            && self.cuMemAddressReserve.is_some()
            && self.cuMemAddressFree.is_some()
            && self.cuMemCreate.is_some()
            && self.cuMemRelease.is_some()
            && self.cuMemMap.is_some()
            && self.cuMemUnmap.is_some()
            && self.cuMemSetAccess.is_some()
    }

    /// Whether everything is there that the driver's stream-ordered pool takes.
    pub(crate) fn has_pool(&self) -> bool {
        self.cuMemAllocAsync.is_some() && self.cuMemFreeAsync.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes and alignments of a function's parameters, in order.
    pub(crate) type Signature = &'static [(usize, usize)];

    /// A pointer to a function, of any calling convention.
    pub(crate) trait Shape {
        const SIGNATURE: Signature;
    }

    macro_rules! shapes {
        ($($($arg:ident)*;)*) => {$(
            impl<R, $($arg),*> Shape for unsafe fn($($arg),*) -> R {
                const SIGNATURE: Signature = &[$((size_of::<$arg>(), align_of::<$arg>())),*];
            }
            impl<R, $($arg),*> Shape for unsafe extern "C" fn($($arg),*) -> R {
                const SIGNATURE: Signature = &[$((size_of::<$arg>(), align_of::<$arg>())),*];
            }
        )*};
    }

    shapes! { ; A; A B; A B C; A B C D; A B C D E; A B C D E F; A B C D E F G H I J K; }

    pub(crate) fn signature<F: Shape>(_: F) -> Signature {
        F::SIGNATURE
    }

    #[test]
    fn signatures_are_those_of_the_bindings() {
        for (name, ours, theirs) in signatures::required() {
            assert_eq!(ours, theirs, "{name}");
        }
    }
}
