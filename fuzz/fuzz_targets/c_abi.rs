//! Calls of the C interface with any handles and pointers, on the stand-in driver: `ci/standin cargo
//! fuzz run c_abi`. Live memory is never handed out twice, and what was freed is not live.
#![no_main]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::null_mut;

use libfuzzer_sys::fuzz_target;

/// A pointer to nothing that is live: the byte decides which.
fn wild(byte: u8, live: &BTreeMap<usize, usize>) -> *mut c_void {
    let near = live.keys().nth(usize::from(byte) % live.len().max(1)).copied().unwrap_or(0);
    [near + 1, usize::from(byte), usize::MAX, near.wrapping_sub(512)][usize::from(byte % 4)] as *mut c_void
}

fuzz_target!(|steps: Vec<(u8, u8, u32)>| {
    let mut live: BTreeMap<usize, usize> = BTreeMap::new();
    for (what, which, number) in steps {
        let (device, bytes) = (i32::from(which % 3) - 1, number as usize);
        // The default streams; other handles are a promise of the caller.
        let stream = (which % 3) as usize as *mut c_void;
        let one = live.keys().nth(usize::from(which) % live.len().max(1)).copied();
        match what % 8 {
            0 | 1 => {
                let ptr = aquifer_c::aquifer_malloc(bytes, device, stream) as usize;
                let clear = |(&at, &length): (&usize, &usize)| at + length <= ptr || ptr + bytes <= at;
                assert!(ptr == 0 || live.iter().all(clear), "memory was handed out twice");
                if ptr != 0 {
                    live.insert(ptr, bytes);
                }
            }
            2 => {
                if let Some(ptr) = one {
                    aquifer_c::aquifer_free(ptr as *mut c_void, bytes, -1, null_mut());
                    live.remove(&ptr);
                }
            }
            3 => {
                if let Some(ptr) = one {
                    aquifer_c::aquifer_free_on(ptr as *mut c_void, stream);
                    live.remove(&ptr);
                }
            }
            4 => {
                let ptr = wild(which, &live);
                if !live.contains_key(&(ptr as usize)) {
                    aquifer_c::aquifer_free(ptr, bytes, device, stream);
                    aquifer_c::aquifer_record_stream(ptr, stream);
                }
            }
            5 => _ = aquifer_c::aquifer_empty_cache(device),
            6 => _ = aquifer_c::aquifer_trim_to(device, u64::from(number)),
            _ => _ = aquifer_c::aquifer_available_after(device, u64::from(number)),
        }
    }
    live.keys().for_each(|&ptr| aquifer_c::aquifer_free(ptr as *mut c_void, 0, -1, null_mut()));
    assert_eq!(aquifer_c::aquifer_memory_allocated(0), 0, "what was freed is not live");
});
