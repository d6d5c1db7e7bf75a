//! Functions by name: `cuGetProcAddress`, through which the CUDA runtime and newer programs find
//! the driver's functions.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::call::{Form, NOT_FOUND, Next};
use crate::table::functions;

/// A symbol without its suffixes, as programs ask for it.
fn base(symbol: &str) -> &str {
    let symbol = symbol.trim_end_matches("_ptsz").trim_end_matches("_ptds");
    match symbol.rsplit_once("_v") {
        Some((base, digits)) if digits.bytes().all(|byte| byte.is_ascii_digit()) => base,
        _ => symbol,
    }
}

/// The symbol that a program of a CUDA version means by a name, and its address here.
fn find(name: &str, version: c_int, per_thread: bool) -> Option<(&'static str, *const ())> {
    let own = [
        (11030, "cuGetProcAddress", cuGetProcAddress as *const ()),
        (12000, "cuGetProcAddress_v2", cuGetProcAddress_v2 as *const ()),
    ];
    let own = own.into_iter().filter(|(since, symbol, _)| base(symbol) == name && *since <= version);
    if let Some((_, symbol, address)) = own.max_by_key(|(since, ..)| *since) {
        return Some((symbol, address));
    }
    // The one name whose meaning became that of another function.
    let name = if name == "cuGraphInstantiate" && version >= 12000 { "cuGraphInstantiateWithFlags" } else { name };
    let fits = |form| form == Form::Legacy || per_thread;
    let known = functions().filter(|known| base(known.name) == name && known.since <= version && fits(known.form));
    let latest = known.max_by_key(|known| (known.form == Form::PerThread, known.since))?;
    Some((latest.name, latest.address))
}

/// Replaces the driver's function that was found by the one here.
///
/// # Safety
/// `symbol` must be null or a C string, and `function` null or writable.
unsafe fn replace(symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64) {
    /// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`
    const PER_THREAD: u64 = 2;
    if symbol.is_null() || function.is_null() {
        return;
    }
    // SAFETY: not null, and the caller vouches for it.
    let name = unsafe { CStr::from_ptr(symbol) };
    // SAFETY: as above.
    let is_there = unsafe { !(*function).is_null() };
    let ours = name.to_str().ok().and_then(|name| find(name, version, flags & PER_THREAD != 0));
    if let (true, Some((_, ours))) = (is_there, ours) {
        // SAFETY: as above.
        unsafe { function.write(ours.cast_mut().cast()) };
    }
}

macro_rules! lookups {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {$(
        /// A function by its name.
        ///
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64, $($arg: $type),*
        ) -> u32 {
            type Found = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, $($type),*) -> u32;
            static NEXT: Next = Next::new(concat!(stringify!($name), "\0"));
            let Some(address) = NEXT.address() else { return NOT_FOUND };
            // SAFETY: the driver's function of this name has this signature.
            let next: Found = unsafe { std::mem::transmute(address) };
            // SAFETY: passed on to the program.
            let code = unsafe { next(symbol, function, version, flags, $($arg),*) };
            if code == 0 {
                // SAFETY: the driver has read the name, and written the address.
                unsafe { replace(symbol, function, version, flags) };
            }
            code
        }
    )*};
}

lookups! {
    cuGetProcAddress();
    cuGetProcAddress_v2(status: *mut c_int);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_the_function_of_the_programs_version() {
        for (name, version, per_thread, symbol) in [
            ("cuMemAlloc", 12080, false, "cuMemAlloc_v2"),
            ("cuMemcpyHtoDAsync", 12080, false, "cuMemcpyHtoDAsync_v2"),
            ("cuMemcpyHtoDAsync", 12080, true, "cuMemcpyHtoDAsync_v2_ptsz"),
            ("cuMemcpyHtoD", 6050, true, "cuMemcpyHtoD_v2"),
            ("cuStreamBeginCapture", 10000, false, "cuStreamBeginCapture"),
            ("cuGraphInstantiate", 11080, false, "cuGraphInstantiate_v2"),
            ("cuGraphInstantiate", 12000, false, "cuGraphInstantiateWithFlags"),
            ("cuCtxSynchronize", 12080, false, "cuCtxSynchronize"),
            ("cuCtxSynchronize", 13000, false, "cuCtxSynchronize_v2"),
            ("cuGetProcAddress", 11080, false, "cuGetProcAddress"),
            ("cuGetProcAddress", 12080, true, "cuGetProcAddress_v2"),
        ] {
            assert_eq!(find(name, version, per_thread).map(|found| found.0), Some(symbol), "{name} {version}");
        }
        assert_eq!(find("cuMemAlloc", 3010, false), None, "the one with sizes of 32 bits");
        assert_eq!(find("cuMemGetInfo", 12080, false), None);
    }
}
