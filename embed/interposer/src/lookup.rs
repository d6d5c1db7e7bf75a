//! Functions by name: `cuGetProcAddress`, through which the CUDA runtime and newer programs find
//! the driver's functions.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::driver::driver;
use crate::{memory, pointers};

/// A function that is served.
struct Function {
    /// Its name without suffixes, as programs ask for it.
    name: &'static str,
    /// The first CUDA version in whose headers the name means this function.
    since: c_int,
    /// Handle 0 means the calling thread's default stream.
    per_thread: bool,
    address: *const (),
}

macro_rules! served {
    ($($since:literal $($per_thread:ident)? $name:literal => $function:path;)*) => {
        [$(Function {
            name: $name,
            since: $since,
            per_thread: served!(@ $($per_thread)?),
            address: $function as *const (),
        },)*]
    };
    (@) => { false };
    (@ per_thread) => { true };
}

fn find(name: &str, version: c_int, per_thread: bool) -> Option<*const ()> {
    let functions = served! {
        12000 "cuGetProcAddress" => cuGetProcAddress_v2;
        11030 "cuGetProcAddress" => cuGetProcAddress;
        3020 "cuMemAlloc" => memory::cuMemAlloc_v2;
        3020 "cuMemAllocPitch" => memory::cuMemAllocPitch_v2;
        3020 "cuMemFree" => memory::cuMemFree_v2;
        3020 "cuMemGetInfo" => memory::cuMemGetInfo_v2;
        11020 per_thread "cuMemAllocAsync" => memory::cuMemAllocAsync_ptsz;
        11020 "cuMemAllocAsync" => memory::cuMemAllocAsync;
        11020 per_thread "cuMemAllocFromPoolAsync" => memory::cuMemAllocFromPoolAsync_ptsz;
        11020 "cuMemAllocFromPoolAsync" => memory::cuMemAllocFromPoolAsync;
        11020 per_thread "cuMemFreeAsync" => memory::cuMemFreeAsync_ptsz;
        11020 "cuMemFreeAsync" => memory::cuMemFreeAsync;
        11020 "cuMemPoolSetAccess" => memory::cuMemPoolSetAccess;
        11020 "cuDeviceSetMemPool" => memory::cuDeviceSetMemPool;
        7000 "cuDevicePrimaryCtxReset" => memory::cuDevicePrimaryCtxReset_v2;
        4000 "cuStreamDestroy" => memory::cuStreamDestroy_v2;
        4000 "cuCtxEnablePeerAccess" => memory::cuCtxEnablePeerAccess;
        3020 "cuMemGetAddressRange" => pointers::cuMemGetAddressRange_v2;
        4000 "cuPointerGetAttribute" => pointers::cuPointerGetAttribute;
        7000 "cuPointerGetAttributes" => pointers::cuPointerGetAttributes;
        4010 "cuIpcGetMemHandle" => pointers::cuIpcGetMemHandle;
    };
    let known = |function: &&Function| {
        function.name == name && function.since <= version && (per_thread || !function.per_thread)
    };
    functions.iter().find(known).map(|function| function.address)
}

/// Replaces the driver's function that was found by the one here.
///
/// # Safety
/// `symbol` must be a C string and `function` writable.
unsafe fn replace(symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64) {
    /// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`
    const PER_THREAD: u64 = 2;
    // SAFETY: passed on to the caller.
    let name = unsafe { CStr::from_ptr(symbol) };
    // SAFETY: as above.
    let is_there = unsafe { !(*function).is_null() };
    let ours = name.to_str().ok().and_then(|name| find(name, version, flags & PER_THREAD != 0));
    if let (true, Some(ours)) = (is_there, ours) {
        // SAFETY: as above.
        unsafe { function.write(ours.cast_mut().cast()) };
    }
}

/// A function by its name, in the shape of CUDA 11.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> u32 {
    // SAFETY: passed on to the program.
    let code = unsafe { driver().cuGetProcAddress(symbol, function, version, flags) };
    if code == 0 && !symbol.is_null() && !function.is_null() {
        // SAFETY: the driver has read the name, and written the address.
        unsafe { replace(symbol, function, version, flags) };
    }
    code
}

/// A function by its name.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> u32 {
    // SAFETY: passed on to the program.
    let code = unsafe { driver().cuGetProcAddress_v2(symbol, function, version, flags, status) };
    if code == 0 && !symbol.is_null() && !function.is_null() {
        // SAFETY: the driver has read the name, and written the address.
        unsafe { replace(symbol, function, version, flags) };
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_the_function_of_the_programs_version() {
        let is = |found: Option<*const ()>, function: *const ()| found == Some(function);
        assert!(is(find("cuMemAlloc", 12080, false), memory::cuMemAlloc_v2 as *const ()));
        assert!(find("cuMemAlloc", 3010, false).is_none(), "the one with sizes of 32 bits");
        assert!(is(find("cuMemAllocAsync", 12080, false), memory::cuMemAllocAsync as *const ()));
        assert!(is(find("cuMemAllocAsync", 12080, true), memory::cuMemAllocAsync_ptsz as *const ()));
        assert!(is(find("cuGetProcAddress", 11080, false), cuGetProcAddress as *const ()));
        assert!(is(find("cuGetProcAddress", 12080, true), cuGetProcAddress_v2 as *const ()));
        assert!(find("cuLaunchKernel", 12080, false).is_none());
    }
}
