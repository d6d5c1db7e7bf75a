//! What fails on order, what a failure is called, and what stays of it.

use std::ffi::CStr;
use std::ptr::null_mut;

use aquifer_device::Code;
use aquifer_standin::{LoadError, Standin};
use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, DriverError};

use crate::support::{Card, MIB, call, standin};

#[test]
fn codes_have_names_and_texts() {
    let mut text = null();
    assert_eq!(call!(cuGetErrorName(CUresult::CUDA_ERROR_OUT_OF_MEMORY, &mut text)), 0);
    // SAFETY: the driver's strings last for ever.
    assert_eq!(unsafe { CStr::from_ptr(text) }, c"CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(call!(cuGetErrorString(CUresult::CUDA_ERROR_NOT_READY, &mut text)), 0);
    // SAFETY: the driver's strings last for ever.
    assert_eq!(unsafe { CStr::from_ptr(text) }, c"not ready");
    assert_eq!(call!(cuGetErrorString(CUresult::CUDA_SUCCESS, &mut text)), 0);
    assert_eq!(call!(cuGetErrorName(CUresult::CUDA_ERROR_PROFILER_DISABLED, &mut text)), 1);
    assert!(text.is_null());
    assert!(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY).to_string().contains("out of memory"));
}

fn null<T>() -> *const T {
    std::ptr::null()
}

#[test]
fn faults_of_the_simulated_device_strike() {
    let card = Card::new();
    card.device.inject("fault=cuMemAlloc#2:out_of_memory,fault=cuStreamCreate#1:999").unwrap();
    let alloc = || call!(cuMemAlloc_v2(&mut 0, MIB));
    assert_eq!([alloc(), alloc(), alloc()], [0, 2, 0]);
    let create = || call!(cuStreamCreate(&mut null_mut(), 0));
    assert_eq!([create(), create()], [999, 0]);
    card.device.inject("fault_rate=any:1:2").unwrap();
    assert_eq!(alloc(), 2);
    card.device.clear_faults();
    assert_eq!(alloc(), 0);
    for wrong in ["", "seed=1", "fault=cuMagic#1:2"] {
        assert!(card.device.inject(wrong).is_err(), "{wrong}");
    }
    card.device.inject("fault=cuMemAlloc#1:12345").unwrap();
    assert_eq!(alloc(), 999, "bindings do not know the code, so it does not reach them");
}

#[test]
fn a_lost_device_stays_lost() {
    let card = Card::new();
    let ptr = card.alloc(MIB);
    card.device.inject("lost_at=1").unwrap();
    let answers = || [call!(cuMemFree_v2(ptr)), call!(cuCtxSynchronize()), call!(cuMemAlloc_v2(&mut 0, MIB))];
    assert_eq!([answers(), answers()], [[214; 3]; 2]);
    card.device.clear_faults();
    assert_eq!(answers(), [214; 3]);
    drop(card.context);
    let again = CudaContext::new(card.device.ordinal() as usize).unwrap();
    assert_eq!(call!(cuMemAlloc_v2(&mut 0, MIB)), 0, "a new context finds a new device");
    drop(again);
}

#[test]
fn any_function_can_be_made_to_fail_in_one_thread() {
    let card = Card::new();
    let standin = standin();
    standin.fail("cuCtxSetCurrent", 2, Code(999)).unwrap();
    let set = || call!(cuCtxSetCurrent(card.context.cu_ctx()));
    assert_eq!(std::thread::spawn(|| call!(cuCtxSetCurrent(null_mut()))).join().unwrap(), 0);
    assert_eq!([set(), set(), set()], [0, 999, 0]);
    assert_eq!(standin.orders_left(), 0);
    standin.fail("any", 1000, Code::OUT_OF_MEMORY).unwrap();
    assert_eq!((standin.orders_left(), standin.clear_orders(), standin.orders_left()), (1, 1, 0));
    for (function, nth, code) in [("cuMagic", 1, 999), ("any", 0, 999), ("any", 1, 0), ("any", 1, 12345)] {
        assert!(standin.fail(function, nth, Code(code)).is_err(), "{function} {nth} {code}");
    }
}

/// A program that makes a context, a stream, memory, a copy, and gives everything back. How far it
/// came shows in its result.
fn program(ordinal: usize) -> Result<Vec<u32>, DriverError> {
    let context = CudaContext::new(ordinal)?;
    let stream = context.new_stream()?;
    let data = stream.clone_htod(&[1_u32, 2, 3])?;
    let copy = data.try_clone()?;
    let back = stream.clone_dtoh(&copy)?;
    drop((data, copy));
    stream.synchronize()?;
    context.check_err()?;
    Ok(back)
}

#[test]
fn each_call_of_a_program_can_fail_once() {
    let standin: &Standin = standin();
    let mut failed = 0;
    for nth in 1.. {
        let device = standin.add_device("1GiB").unwrap();
        standin.fail("any", nth, Code(999)).unwrap();
        let outcome = program(device.ordinal() as usize);
        if standin.clear_orders() > 0 {
            assert_eq!(outcome, Ok(vec![1, 2, 3]), "nothing failed");
            break;
        }
        failed += u32::from(outcome.is_err());
        assert_eq!(device.violations(), [""; 0], "call {nth}");
        assert_eq!(program(device.ordinal() as usize), Ok(vec![1, 2, 3]), "after call {nth} failed");
    }
    assert!(failed > 20, "{failed} failures were seen");
}

#[test]
fn errors_of_the_loader_say_what_to_do() {
    let missing = LoadError::Environment("x".to_owned());
    assert!(missing.to_string().contains("environment"));
    assert!(standin().path().ends_with("libaquifer_standin.so"));
    let refused = standin().add_device("1GiB,sede=1").unwrap_err();
    assert!(refused.to_string().contains("seed") && refused.code == Code::INVALID_VALUE, "{refused}");
}
