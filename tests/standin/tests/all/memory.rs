//! Plain allocations, the pool, and what addresses mean.

use std::ptr::null_mut;

use aquifer_standin::Number;
use cudarc::driver::sys::{CUmemPool_attribute as PoolAttr, CUpointer_attribute as PtrAttr};

use crate::support::{Card, MIB, call};

#[test]
fn memory_is_taken_and_given_back() {
    let card = Card::new();
    let ptr = card.alloc(10 * MIB);
    assert_eq!(card.context.mem_get_info().unwrap().0, (1 << 30) - 10 * MIB);
    let mut other = 7;
    assert_eq!((call!(cuMemAlloc_v2(&mut other, 1 << 30)), other), (2, 7), "what fails leaves the result alone");
    assert_eq!(call!(cuMemAlloc_v2(&mut other, 0)), 1);
    assert_eq!(call!(cuMemAlloc_v2(null_mut(), MIB)), 1);
    assert_eq!([call!(cuMemFree_v2(0)), call!(cuMemFree_v2(ptr)), call!(cuMemFree_v2(ptr))], [0, 0, 1]);
    assert_eq!(card.device.number(Number::HeldBytes), 0);
    assert_eq!((card.device.calls("cuMemAlloc_v2").unwrap(), card.device.calls("cuMemFree_v2").unwrap()), (4, 3));
    assert!(card.device.calls("cuMagic").is_err());
}

#[test]
fn the_pool_counts_its_memory() {
    let card = Card::new();
    let (mut pool, mut own) = (null_mut(), null_mut());
    assert_eq!(call!(cuDeviceGetDefaultMemPool(&mut pool, card.handle())), 0);
    assert_eq!((call!(cuDeviceGetMemPool(&mut own, card.handle())), own), (0, pool));
    let usage = |attribute| {
        let mut bytes = u64::MAX;
        assert_eq!(call!(cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast())), 0);
        bytes
    };
    let stream = card.stream(1);
    let mut ptr = 0;
    assert_eq!(call!(cuMemAllocAsync(&mut ptr, MIB, stream)), 0);
    assert_eq!(usage(PoolAttr::CU_MEMPOOL_ATTR_USED_MEM_CURRENT), MIB as u64);
    assert_eq!([call!(cuMemFreeAsync(ptr, stream)), call!(cuStreamSynchronize(stream))], [0, 0]);
    assert_eq!(usage(PoolAttr::CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 0);
    assert_eq!(usage(PoolAttr::CU_MEMPOOL_ATTR_USED_MEM_HIGH), MIB as u64);
    assert_eq!(call!(cuMemAllocFromPoolAsync(&mut ptr, MIB, pool, stream)), 0);
    assert_eq!([call!(cuMemPoolTrimTo(pool, 0)), call!(cuMemFreeAsync(ptr, stream))], [0, 0]);
    let mut threshold = 5 * MIB as u64;
    let attribute = PoolAttr::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    assert_eq!(usage(attribute), 0);
    assert_eq!(call!(cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast())), 0);
    assert_eq!(usage(attribute), threshold);
    let (reuse, mut on) = (PoolAttr::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, -1);
    assert_eq!(call!(cuMemPoolGetAttribute(pool, reuse, (&raw mut on).cast())), 0);
    assert_eq!(on, 1);
    assert_eq!(call!(cuMemPoolTrimTo(crate::support::wild(), 0)), 1);
    card.assert_no_violation();
}

#[test]
fn memory_freed_while_work_is_pending_is_safe_and_memory_used_after_it_is_not() {
    let card = Card::new();
    let stream = card.stream(1);
    let ptr = card.alloc(MIB);
    assert_eq!([call!(cuMemsetD8Async(ptr, 1, MIB, stream)), call!(cuMemFree_v2(ptr))], [0, 0]);
    card.assert_no_violation();
    assert_eq!(call!(cuMemsetD8Async(ptr, 1, MIB, stream)), 0, "the work itself fails");
    assert_eq!([call!(cuStreamSynchronize(stream)), call!(cuCtxSynchronize())], [700, 700]);
    assert!(card.device.take_violations()[0].contains("use after free"));
    card.assert_no_violation();
}

#[test]
fn addresses_are_attributed_to_their_memory() {
    let card = Card::new();
    let ptr = card.alloc(MIB);
    let mut host = null_mut();
    assert_eq!(call!(cuMemHostAlloc(&mut host, 8192, 1)), 0);
    let fact = |attribute, ptr: u64| {
        let mut value = 0_u64;
        let answer = call!(cuPointerGetAttribute((&raw mut value).cast(), attribute, ptr));
        (answer, value)
    };
    let inside = ptr + 4096;
    assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside), (0, 2));
    assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inside), (0, ptr));
    assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_RANGE_SIZE, inside), (0, MIB as u64));
    assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, inside), (0, card.device.ordinal().into()));
    assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_CONTEXT, inside), (0, card.context.cu_ctx() as u64));
    assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_HOST_POINTER, inside).0, 1);
    let host_address = host as u64 + 100;
    assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, host_address), (0, 1));
    assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_HOST_POINTER, host_address), (0, host_address));
    assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr + MIB as u64).0, 1);
    let (mut start, mut bytes) = (0, 0);
    assert_eq!(call!(cuMemGetAddressRange_v2(&mut start, &mut bytes, inside)), 0);
    assert_eq!((start, bytes), (ptr, MIB));
    assert_eq!(call!(cuMemGetAddressRange_v2(&mut start, &mut bytes, 4096)), 500);
    let (mut kind, mut of) = (9_u32, 9_u64);
    let mut attributes = [PtrAttr::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, PtrAttr::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR];
    let mut data = [(&raw mut kind).cast(), (&raw mut of).cast()];
    let mut ask = |ptr| call!(cuPointerGetAttributes(2, attributes.as_mut_ptr(), data.as_mut_ptr(), ptr));
    assert_eq!([ask(inside), ask(4096)], [0, 0], "an address that is part of nothing is no error here");
    assert_eq!((kind, of), (0, 0));
}
