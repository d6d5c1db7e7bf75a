//! What concerns a whole process: the environment, a driver that is old, and what is in the target
//! folder. Each of these tests runs itself in a process of its own.

use std::env;
use std::ffi::CStr;
use std::ptr::null_mut;

use aquifer_standin::{LoadError, in_process, load};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUdriverProcAddressQueryResult as Found, culib};

use crate::support::{call, refused, standin};

fn version() -> i32 {
    let mut version = 0;
    assert_eq!(call!(cuDriverGetVersion(&mut version)), 0);
    version
}

fn has(symbol: &str) -> bool {
    // SAFETY: the library is loaded by now, and the symbol is not called.
    let library = unsafe { culib() };
    // SAFETY: as above.
    unsafe { library.get::<fn()>(symbol.as_bytes()) }.is_ok()
}

#[test]
fn calls_before_the_start_are_refused() {
    in_process(&[], || {
        standin();
        assert_eq!(version(), 13000, "which works before, as with CUDA");
        let before = [
            call!(cuDeviceGetCount(&mut 0)),
            call!(cuDeviceGet(&mut 0, 0)),
            call!(cuCtxSetCurrent(null_mut())),
            call!(cuMemAlloc_v2(&mut 0, 1)),
            call!(cuDevicePrimaryCtxRetain(&mut null_mut(), 0)),
        ];
        assert_eq!(before, [3; 5]);
        assert_eq!([call!(cuInit(1)), call!(cuInit(0)), call!(cuInit(0))], [1, 0, 0]);
        assert_eq!(call!(cuMemAlloc_v2(&mut 0, 1)), 201);
    });
}

#[test]
fn there_may_be_no_device() {
    in_process(&[("AQUIFER_STANDIN_DEVICES", "none")], || {
        standin();
        assert_eq!([call!(cuInit(0)), refused(CudaContext::device_count())], [100, 100]);
        assert_eq!(refused(CudaContext::new(0)), 100);
    });
}

#[test]
fn devices_can_be_hidden() {
    in_process(&[("CUDA_VISIBLE_DEVICES", "")], || {
        standin();
        assert_eq!(call!(cuInit(0)), 100);
    });
}

#[test]
fn the_environment_lists_devices() {
    let variables = [("AQUIFER_STANDIN_DEVICES", "8GiB;sim:rtx4090;4GiB"), ("CUDA_VISIBLE_DEVICES", "2,1")];
    in_process(&variables, || {
        standin();
        assert_eq!(call!(cuInit(0)), 0);
        assert_eq!(CudaContext::device_count().unwrap(), 2);
        assert_eq!(CudaContext::new(0).unwrap().total_mem().unwrap(), 4 << 30);
        assert!(CudaContext::new(1).unwrap().name().unwrap().contains("4090"));
        assert_eq!(standin().device(1).violations(), [""; 0]);
    });
}

#[test]
fn the_environment_makes_calls_fail() {
    let variables =
        [("AQUIFER_STANDIN_FAULTS", "fault=cuMemAlloc#2:out_of_memory"), ("AQUIFER_STANDIN_FAIL", "cuInit#1:34")];
    in_process(&variables, || {
        standin();
        assert_eq!([call!(cuInit(0)), call!(cuInit(0))], [34, 0]);
        let context = CudaContext::new(0).unwrap();
        assert_eq!([call!(cuMemAlloc_v2(&mut 0, 1)), call!(cuMemAlloc_v2(&mut 0, 1))], [0, 2]);
        drop(context);
    });
}

#[test]
fn an_environment_that_makes_no_sense_is_reported() {
    in_process(&[("AQUIFER_STANDIN_DEVICES", "huge")], || {
        let Err(LoadError::Environment(text)) = load() else { panic!("it was understood") };
        assert!(text.contains("huge"), "{text}");
    });
}

#[test]
fn an_old_driver_lacks_functions() {
    let variables = [("AQUIFER_STANDIN_VERSION", "11040"), ("AQUIFER_STANDIN_WITHOUT", "cuMemAddressReserve")];
    in_process(&variables, || {
        standin();
        assert_eq!(version(), 11040);
        for symbol in ["cuStreamGetId", "cuMemcpyBatchAsync", "cuEventElapsedTime_v2", "cuMemAddressReserve"] {
            assert!(!has(symbol), "{symbol}");
        }
        for symbol in ["cuMemAlloc_v2", "cuMemCreate", "cuEventElapsedTime"] {
            assert!(has(symbol), "{symbol}");
        }
        let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        let data = stream.clone_htod(&[1_u32, 2]).unwrap();
        assert_eq!(stream.clone_dtoh(&data).unwrap(), [1, 2], "what is left works");
        let newer = c".version 8.0\n.target sm_75\n";
        assert_eq!(call!(cuModuleLoadData(&mut null_mut(), newer.as_ptr().cast())), 222);
    });
}

fn address(name: &CStr, version: i32) -> (u32, bool, Found) {
    let (mut function, mut found) = (null_mut(), Found::CU_GET_PROC_ADDRESS_SUCCESS);
    let answer = call!(cuGetProcAddress_v2(name.as_ptr(), &mut function, version, 0, &mut found));
    (answer, !function.is_null(), found)
}

#[test]
fn functions_are_found_by_their_plain_name() {
    in_process(&[], || {
        standin();
        assert_eq!(address(c"cuMemAlloc", 12080), (0, true, Found::CU_GET_PROC_ADDRESS_SUCCESS));
        assert_eq!(address(c"cuMagic", 12080), (500, false, Found::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND));
        let too_new = Found::CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        assert_eq!(address(c"cuStreamGetId", 11040), (500, false, too_new));
        let mut pair = [null_mut(); 2];
        for (function, version) in pair.iter_mut().zip([12080, 13000]) {
            assert_eq!(call!(cuGetProcAddress_v2(c"cuMemcpyBatchAsync".as_ptr(), function, version, 0, null_mut())), 0);
        }
        assert_ne!(pair[0], pair[1], "each version of CUDA has its own shape of it");
    });
}

#[test]
fn no_file_of_the_driver_s_name_is_made() {
    let program = env::current_exe().unwrap();
    for folder in program.ancestors().skip(1).take(2) {
        let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let driver = |name: &String| ["libcuda", "nvcuda", "libnvcuda"].iter().any(|start| name.starts_with(start));
        // Rust's own libraries, such as that of the crate cudarc, are no shared ones.
        let shared = |name: &String| [".so", ".dll", ".dylib"].iter().any(|end| name.contains(end));
        let taken: Vec<_> = names.filter(|name| driver(name) && shared(name)).collect();
        assert!(taken.is_empty(), "{} has {taken:?}: cargo lets programs find libraries there", folder.display());
    }
}
