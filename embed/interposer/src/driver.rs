//! The driver behind this library: the functions of it that are called here.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LAZY};

/// The name by which this library depends on the driver: see `build.rs`.
pub(crate) const NAME: &str = "libaquifer_driver.so";

pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_INITIALIZED: u32 = 3;
pub(crate) const NOT_FOUND: u32 = 500;
pub(crate) const PEER_ACCESS_ALREADY_ENABLED: u32 = 704;
pub(crate) const NOT_SUPPORTED: u32 = 801;
pub(crate) const UNKNOWN: u32 = 999;

/// A handle of a context, a stream or a pool.
pub(crate) type Handle = u64;

/// Access of a device to a pool: `CUmemAccessDesc`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PoolAccess {
    /// 1 for a device.
    pub(crate) location: c_int,
    pub(crate) ordinal: c_int,
    /// 0 for none.
    pub(crate) flags: c_int,
}

/// Declares the functions, and a method for each that calls it, or answers `NOT_FOUND` where the
/// driver does not have it.
macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        #[allow(non_snake_case, reason = "these are the driver's names")]
        #[derive(Default)]
        pub(crate) struct Driver {
            $($name: Option<unsafe extern "C" fn($($type),*) -> u32>,)*
        }

        #[allow(non_snake_case, reason = "these are the driver's names")]
        impl Driver {
            fn of(library: &Library) -> Driver {
                Driver {$(
                    $name: {
                        // SAFETY: the driver's function of this name has this signature.
                        let found = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        found.ok().map(|function| *function)
                    },
                )*}
            }

            $(
                /// # Safety
                /// As the driver's function.
                pub(crate) unsafe fn $name(&self, $($arg: $type),*) -> u32 {
                    match self.$name {
                        // SAFETY: passed on to the caller.
                        Some(function) => unsafe { function($($arg),*) },
                        None => NOT_FOUND,
                    }
                }
            )*
        }
    };
}

functions! {
    cuCtxEnablePeerAccess(peer: Handle, flags: u32);
    cuCtxGetCurrent(context: *mut Handle);
    cuCtxGetDevice(device: *mut c_int);
    cuCtxPopCurrent_v2(context: *mut Handle);
    cuCtxPushCurrent_v2(context: Handle);
    cuDeviceGetDefaultMemPool(pool: *mut Handle, device: c_int);
    cuDevicePrimaryCtxGetState(device: c_int, flags: *mut u32, active: *mut c_int);
    cuDevicePrimaryCtxRelease_v2(device: c_int);
    cuDevicePrimaryCtxReset_v2(device: c_int);
    cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int);
    cuDeviceSetMemPool(device: c_int, pool: Handle);
    cuGetProcAddress(symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64);
    cuGetProcAddress_v2(
        symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int
    );
    cuIpcGetMemHandle(handle: *mut c_void, ptr: u64);
    cuMemAllocAsync(ptr: *mut u64, bytes: usize, stream: Handle);
    cuMemAllocFromPoolAsync(ptr: *mut u64, bytes: usize, pool: Handle, stream: Handle);
    cuMemAllocPitch_v2(ptr: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32);
    cuMemAlloc_v2(ptr: *mut u64, bytes: usize);
    cuMemFreeAsync(ptr: u64, stream: Handle);
    cuMemFree_v2(ptr: u64);
    cuMemGetAddressRange_v2(start: *mut u64, bytes: *mut usize, ptr: u64);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemPoolSetAccess(pool: Handle, accesses: *const PoolAccess, count: usize);
    cuPointerGetAttribute(data: *mut c_void, attribute: u32, ptr: u64);
    cuPointerGetAttributes(count: u32, attributes: *mut u32, data: *mut *mut c_void, ptr: u64);
    cuStreamDestroy_v2(stream: Handle);
    cuStreamGetCtx(stream: Handle, context: *mut Handle);
    cuStreamIsCapturing(stream: Handle, status: *mut u32);
    cuStreamSynchronize(stream: Handle);
}

/// The driver. It is loaded already, because this library depends on it.
pub(crate) fn driver() -> &'static Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    DRIVER.get_or_init(|| {
        // SAFETY: the library is loaded already, so no initialisation runs.
        match unsafe { Library::open(Some(NAME), RTLD_LAZY) } {
            Ok(library) => {
                let driver = Driver::of(&library);
                std::mem::forget(library);
                driver
            }
            Err(error) => {
                eprintln!("aquifer: the CUDA driver cannot be called: {error}");
                Driver::default()
            }
        }
    })
}
