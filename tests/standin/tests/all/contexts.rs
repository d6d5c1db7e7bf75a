//! Devices and contexts.

use std::ptr::null_mut;
use std::thread;

use aquifer_standin::Number;
use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUdevice_attribute as Attr;

use crate::support::{Card, MIB, call, current, refused, standin, wild};

#[test]
fn a_device_reports_its_attributes() {
    let card = Card::with("rtx4090");
    let name = card.context.name().unwrap();
    assert!(name.contains("simulated") && name.contains("RTX 4090"), "{name}");
    assert_eq!(card.context.mem_get_info().unwrap(), (24 << 30, 24 << 30));
    assert_eq!(card.context.total_mem().unwrap(), 24 << 30);
    assert_eq!(card.context.compute_capability().unwrap(), (8, 9));
    let attribute = |attribute| card.context.attribute(attribute).unwrap();
    assert_eq!(attribute(Attr::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), 128);
    assert_eq!(attribute(Attr::CU_DEVICE_ATTRIBUTE_WARP_SIZE), 32);
    assert_eq!(attribute(Attr::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED), 1);
    assert_eq!(attribute(Attr::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED), 0);
    assert_eq!(call!(cuDeviceGetAttribute(&mut 0, Attr::CU_DEVICE_ATTRIBUTE_WARP_SIZE, -1)), 101);
    let other = Card::new();
    assert_ne!(card.context.uuid().unwrap().bytes, other.context.uuid().unwrap().bytes);
    let mut short = [1; 5];
    assert_eq!(call!(cuDeviceGetName(short.as_mut_ptr(), 5, card.handle())), 0);
    assert_eq!(short.map(|byte| byte as u8), *b"simu\0");
}

#[test]
fn added_devices_are_not_counted_and_gone_when_dropped() {
    let count = || CudaContext::device_count().unwrap();
    let card = Card::new();
    let ordinal = card.device.ordinal();
    assert!(ordinal >= 1 && count() == 1, "the environment's device is the only one that is counted");
    let (mut device, handle) = (0, card.handle());
    assert_eq!((call!(cuDeviceGet(&mut device, handle)), device), (0, handle));
    let context = card.context.cu_ctx();
    drop(card);
    assert_eq!(call!(cuCtxSetCurrent(context)), 201, "contexts of the device are gone");
    assert_eq!(call!(cuDeviceGet(&mut device, 4095)), 101);
    assert_eq!(refused(CudaContext::new(4095)), 101);
    assert!(standin().add_device("huge").unwrap_err().to_string().contains("huge"));
}

#[test]
fn calls_without_a_current_context_fail() {
    let card = Card::new();
    let ptr = card.alloc(MIB);
    let stream = card.stream(0) as usize;
    thread::spawn(move || {
        assert!(current().is_null());
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        let (mut other, mut free, mut total) = (0, 0, 0);
        let answers = [
            call!(cuMemAlloc_v2(&mut other, MIB)),
            call!(cuMemFree_v2(ptr)),
            call!(cuMemGetInfo_v2(&mut free, &mut total)),
            call!(cuMemsetD8Async(ptr, 0, MIB, stream)),
            call!(cuStreamSynchronize(stream)),
            call!(cuStreamDestroy_v2(stream)),
            call!(cuEventCreate(&mut null_mut(), 0)),
            call!(cuMemHostAlloc(&mut null_mut(), 4096, 0)),
            call!(cuMemAddressReserve(&mut other, MIB, 0, 0, 0)),
            call!(cuModuleLoadData(&mut null_mut(), c"".as_ptr().cast())),
            call!(cuCtxSynchronize()),
            call!(cuCtxGetDevice(&mut 0)),
            call!(cuCtxPopCurrent_v2(&mut null_mut())),
        ];
        assert_eq!(answers, [201; 13]);
    })
    .join()
    .unwrap();
    assert_eq!(call!(cuMemFree_v2(ptr)), 0, "nothing happened to the memory");
}

#[test]
fn contexts_are_stacked_in_each_thread() {
    let (one, two) = (Card::new(), Card::new());
    let (first, second) = (one.context.cu_ctx(), two.context.cu_ctx());
    let device = || {
        let mut device = -1;
        assert_eq!(call!(cuCtxGetDevice(&mut device)), 0);
        device
    };
    assert_eq!((current(), device()), (second, two.handle()));
    assert_eq!(call!(cuCtxPushCurrent_v2(first)), 0);
    assert_eq!((current(), device()), (first, one.handle()));
    let mut popped = null_mut();
    assert_eq!((call!(cuCtxPopCurrent_v2(&mut popped)), popped), (0, first));
    assert_eq!(current(), second);
    assert_eq!((call!(cuCtxSetCurrent(null_mut())), current()), (0, null_mut()));
    assert_eq!(call!(cuCtxPopCurrent_v2(&mut popped)), 201);
    assert_eq!([call!(cuCtxSetCurrent(wild())), call!(cuCtxPushCurrent_v2(wild()))], [201, 201]);
    let deep = (0..20).map(|_| call!(cuCtxPushCurrent_v2(first))).collect::<Vec<_>>();
    assert_eq!((deep[15], deep[16]), (0, 2), "a stack has an end");
}

#[test]
fn the_primary_context_lives_while_it_is_retained() {
    let card = Card::new();
    let handle = card.handle();
    let mut context = null_mut();
    assert_eq!((call!(cuDevicePrimaryCtxRetain(&mut context, handle)), context), (0, card.context.cu_ctx()));
    assert_eq!(card.device.number(Number::Retained), 2);
    assert_eq!(call!(cuDevicePrimaryCtxRelease_v2(handle)), 0);
    let ptr = card.alloc(MIB);
    let device = card.device;
    drop(card.context);
    let state = |handle| {
        let (mut flags, mut active) = (1, 1);
        assert_eq!(call!(cuDevicePrimaryCtxGetState(handle, &mut flags, &mut active)), 0);
        (flags, active)
    };
    assert_eq!(state(handle), (0, 0));
    assert_eq!(
        device.number(Number::HeldBytes),
        MIB as u64,
        "memory that was not freed is counted until the next life"
    );
    assert_eq!([call!(cuMemFree_v2(ptr)), call!(cuDevicePrimaryCtxRelease_v2(handle))], [709, 201]);
    let again = CudaContext::new(device.ordinal() as usize).unwrap();
    assert_eq!((again.cu_ctx(), state(handle)), (context, (0, 1)));
    assert_eq!(device.number(Number::HeldBytes), 0);
    assert_eq!(call!(cuMemFree_v2(ptr)), 1, "the memory ended with the context");
}

#[test]
fn a_created_context_is_current_until_it_is_destroyed() {
    let card = Card::new();
    let mut created = null_mut();
    assert_eq!(call!(cuCtxCreate_v2(&mut created, 0, card.handle())), 0);
    assert_eq!(current(), created);
    let elsewhere = created as usize;
    thread::spawn(move || {
        assert_eq!(call!(cuCtxSetCurrent(std::ptr::with_exposed_provenance_mut(elsewhere))), 0);
        assert_eq!(call!(cuCtxDestroy_v2(std::ptr::with_exposed_provenance_mut(elsewhere))), 0);
        assert!(current().is_null());
    })
    .join()
    .unwrap();
    assert_eq!(current(), created, "it is still current here");
    assert_eq!([call!(cuCtxSynchronize()), call!(cuCtxDestroy_v2(created))], [709, 709]);
    assert_eq!(call!(cuCtxDestroy_v2(card.context.cu_ctx())), 201, "a primary context is released, not destroyed");
}

#[test]
fn resetting_the_primary_context_takes_everything_and_heals_the_device() {
    let card = Card::new();
    card.alloc(MIB);
    card.device.inject("lost_at=1").unwrap();
    assert_eq!([call!(cuCtxSynchronize()), call!(cuMemFree_v2(0)), call!(cuCtxSynchronize())], [214, 0, 214]);
    let mut flags = 0;
    // The older name of the same function is what the bindings have.
    assert_eq!(call!(cuDevicePrimaryCtxReset_v2(card.handle())), 0);
    assert_eq!(call!(cuDevicePrimaryCtxGetState(card.handle(), &mut flags, &mut 0)), 0);
    assert_eq!(card.context.mem_get_info().unwrap(), (1 << 30, 1 << 30));
}

#[test]
fn handles_of_another_device_are_refused() {
    let (one, two) = (Card::new(), Card::new());
    let (stream, event, ptr) = (two.stream(0), two.event(0), two.alloc(MIB));
    one.context.bind_to_thread().unwrap();
    let answers = [
        call!(cuStreamSynchronize(stream)),
        call!(cuStreamQuery(stream)),
        call!(cuEventRecord(event, null_mut())),
        call!(cuEventQuery(event)),
        call!(cuStreamDestroy_v2(stream)),
        call!(cuEventDestroy_v2(event)),
        call!(cuMemRelease(1)),
    ];
    assert_eq!(answers, [400; 7]);
    assert_eq!(call!(cuMemFree_v2(ptr)), 1);
}
