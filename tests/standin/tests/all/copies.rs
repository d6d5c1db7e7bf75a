//! Copies and fills, with pageable and pinned memory.

use std::ptr::null_mut;

use aquifer_standin::Number;
use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUmemLocation, CUmemLocationType, CUmemcpyAttributes, CUmemcpySrcAccessOrder, CUmemorytype,
};

use crate::support::{Card, MIB, call, refused};

fn pattern(bytes: usize) -> Vec<u8> {
    (0..=250).cycle().take(bytes).collect()
}

/// Pinned memory from the driver, as an address.
fn pinned(bytes: usize) -> *mut u8 {
    let mut host = null_mut();
    assert_eq!(call!(cuMemHostAlloc(&mut host, bytes, 0)), 0);
    host.cast()
}

#[test]
fn bytes_arrive_by_every_way() {
    let card = Card::new();
    let stream = card.stream(1);
    let (bytes, data) = (100_000, pattern(100_000));
    let (one, two) = (card.alloc(bytes), card.alloc(bytes));
    assert_eq!(call!(cuMemcpyHtoD_v2(one, data.as_ptr().cast(), bytes)), 0);
    assert_eq!(call!(cuMemcpyDtoDAsync_v2(two, one, bytes, stream)), 0);
    let mut back = vec![0; bytes];
    assert_eq!(call!(cuMemcpyDtoHAsync_v2(back.as_mut_ptr().cast(), two, bytes, stream)), 0);
    assert_eq!(back, data, "a copy to pageable memory is there when the call returns");
    assert_eq!(call!(cuMemcpyDtoD_v2(one + 50_000, one, 50_000)), 0);
    assert_eq!(card.read(one + 50_000, 4), data[..4]);
    assert_eq!(call!(cuMemcpyDtoD_v2(one + 1, one, 50)), 1, "ranges overlap");
    assert_eq!(call!(cuMemcpyHtoD_v2(one, std::ptr::null(), 4)), 1);
    let context = card.context.cu_ctx();
    assert_eq!(call!(cuMemcpyPeerAsync(one, context, two, context, 4, stream)), 0);
    card.assert_no_violation();
}

#[test]
fn fills_repeat_their_pattern() {
    let card = Card::new();
    let ptr = card.alloc(MIB);
    assert_eq!(call!(cuMemsetD32_v2(ptr, 0x0403_0201, MIB / 4)), 0);
    assert_eq!(card.read(ptr + MIB as u64 - 8, 8), [1, 2, 3, 4, 1, 2, 3, 4]);
    assert_eq!(call!(cuMemsetD16Async(ptr, 0x0605, 3, null_mut())), 0);
    assert_eq!(card.read(ptr, 8), [5, 6, 5, 6, 5, 6, 3, 4]);
    assert_eq!(call!(cuMemsetD8Async(ptr, 9, 2, null_mut())), 0);
    assert_eq!(card.read(ptr, 4), [9, 9, 5, 6]);
    assert_eq!([call!(cuMemsetD32_v2(ptr + 2, 1, 1)), call!(cuMemsetD16_v2(ptr + 1, 1, 1))], [1, 1], "not aligned");
    assert_eq!(call!(cuMemsetD32_v2(ptr, 1, usize::MAX)), 1);
    card.assert_no_violation();
}

#[test]
fn page_locked_memory_is_in_flight_until_it_is_waited_for() {
    let card = Card::new();
    let stream = card.stream(1);
    let (ptr, host) = (card.alloc(MIB), pinned(MIB));
    assert_eq!(card.device.number(Number::PinnedBytes), MIB as u64);
    assert_eq!(call!(cuMemcpyHtoDAsync_v2(ptr, host.cast(), MIB, stream)), 0);
    card.device.host_access(host.addr(), 4, true);
    assert!(card.device.take_violations()[0].contains("host access to memory in flight"));
    assert_eq!(call!(cuStreamSynchronize(stream)), 0);
    card.device.host_access(host.addr(), 4, true);
    card.assert_no_violation();
    let mut flags = 9;
    assert_eq!((call!(cuMemHostGetFlags(&mut flags, host.cast())), flags), (0, 0));
    assert_eq!([call!(cuMemFreeHost(host.cast())), call!(cuMemFreeHost(host.cast()))], [0, 1]);
    assert_eq!(card.device.number(Number::PinnedBytes), 0);
    assert_eq!(call!(cuMemHostAlloc(&mut null_mut(), MIB, 8)), 1, "no such flag");
}

#[test]
fn memory_of_the_program_can_be_registered() {
    let card = Card::new();
    let stream = card.stream(1);
    let (ptr, mut host) = (card.alloc(8192), pattern(8192));
    let start = host.as_mut_ptr().cast();
    assert_eq!(call!(cuMemHostRegister_v2(start, 8192, 1)), 0);
    assert_eq!(call!(cuMemHostRegister_v2(start, 8192, 1)), 712, "it is registered already");
    assert_eq!(call!(cuMemcpyHtoDAsync_v2(ptr, start, 8192, stream)), 0);
    assert_eq!(call!(cuStreamSynchronize(stream)), 0);
    assert_eq!(card.read(ptr, 8192), pattern(8192));
    assert_eq!([call!(cuMemHostUnregister(start)), call!(cuMemHostUnregister(start))], [0, 713]);
    assert_eq!(call!(cuMemHostRegister_v2(start, 8192, 4)), 801, "memory of a device");
    card.assert_no_violation();
}

/// Rows from the host to the device, of 5 bytes in pitches of 16 and 8.
fn rows(src: *const u8, dst: u64) -> CUDA_MEMCPY2D {
    CUDA_MEMCPY2D {
        srcXInBytes: 1,
        srcY: 1,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: src.cast(),
        srcDevice: 0,
        srcArray: null_mut(),
        srcPitch: 16,
        dstXInBytes: 2,
        dstY: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: null_mut(),
        dstDevice: dst,
        dstArray: null_mut(),
        dstPitch: 8,
        WidthInBytes: 5,
        Height: 3,
    }
}

/// What `rows` leaves at the destination, which held zeros.
fn expected(data: &[u8]) -> Vec<u8> {
    let mut all = vec![0; 24];
    for row in 0..3 {
        all[row * 8 + 2..][..5].copy_from_slice(&data[(row + 1) * 16 + 1..][..5]);
    }
    all
}

#[test]
fn rows_are_copied_from_pageable_and_page_locked_memory() {
    let card = Card::new();
    let (ptr, data) = (card.alloc(4096), pattern(64));
    assert_eq!(call!(cuMemsetD8_v2(ptr, 0, 24)), 0);
    assert_eq!(call!(cuMemcpy2D_v2(&rows(data.as_ptr(), ptr))), 0);
    assert_eq!(card.read(ptr, 24), expected(&data));
    let host = pinned(64);
    // SAFETY: the memory has 64 bytes.
    unsafe { host.copy_from(data.as_ptr(), 64) };
    assert_eq!(call!(cuMemsetD8_v2(ptr, 0, 24)), 0);
    let stream = card.stream(0);
    assert_eq!(call!(cuMemcpy2DAsync_v2(&rows(host, ptr), stream)), 0);
    assert_eq!(call!(cuStreamSynchronize(stream)), 0);
    assert_eq!(card.read(ptr, 24), expected(&data));
    let mut narrow = rows(host, ptr);
    narrow.dstPitch = 6;
    assert_eq!(call!(cuMemcpy2D_v2(&narrow)), 1, "a row does not fit into the pitch");
    let tall = CUDA_MEMCPY2D { Height: usize::MAX, ..rows(data.as_ptr(), ptr) };
    assert_eq!(call!(cuMemcpy2D_v2(&tall)), 1, "rows without end");
    narrow = CUDA_MEMCPY2D { dstMemoryType: CUmemorytype::CU_MEMORYTYPE_ARRAY, ..rows(host, ptr) };
    assert_eq!([call!(cuMemcpy2D_v2(&narrow)), call!(cuMemcpy2D_v2(std::ptr::null()))], [801, 1]);
    card.assert_no_violation();
}

/// Enqueues a batch of copies.
fn batch(copies: &[(u64, u64, usize)], first: usize, stream: cudarc::driver::sys::CUstream) -> u32 {
    let (mut dsts, mut srcs, mut sizes) = (Vec::new(), Vec::new(), Vec::new());
    for &(dst, src, bytes) in copies {
        dsts.push(dst);
        srcs.push(src);
        sizes.push(bytes);
    }
    let nowhere = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
    let mut attributes = CUmemcpyAttributes {
        srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        srcLocHint: nowhere,
        dstLocHint: nowhere,
        flags: 0,
    };
    let (mut first, mut failed) = (first, 0);
    let (dsts, srcs, sizes) = (dsts.as_mut_ptr(), srcs.as_mut_ptr(), sizes.as_mut_ptr());
    call!(cuMemcpyBatchAsync(dsts, srcs, sizes, copies.len(), &mut attributes, &mut first, 1, &mut failed, stream))
}

#[test]
fn a_batch_is_many_copies() {
    let card = Card::new();
    let stream = card.stream(1);
    let (ptr, host) = (card.alloc(MIB), pinned(4096));
    // SAFETY: the memory has 4096 bytes.
    unsafe { host.copy_from(pattern(4096).as_ptr(), 4096) };
    let from = host.addr() as u64;
    let copies = [(ptr, from, 100), (ptr + 4096, from + 100, 200), (from + 1000, ptr + 8192, 50)];
    assert_eq!(call!(cuMemsetD8Async(ptr + 8192, 77, 50, stream)), 0);
    assert_eq!(batch(&copies, 0, stream), 0);
    assert_eq!(call!(cuCtxSynchronize()), 0);
    assert_eq!(card.read(ptr, 100), pattern(100));
    assert_eq!(card.read(ptr + 4096, 200), pattern(300)[100..]);
    // SAFETY: the memory has 4096 bytes, and nothing writes it any more.
    let back = unsafe { std::slice::from_raw_parts(host, 4096) };
    assert_eq!(back[1000..1050], [77; 50]);
    assert_eq!(batch(&copies, 1, stream), 1, "attributes must begin with the first copy");
    assert_eq!(batch(&copies, 0, null_mut()), 1, "not on the legacy stream");
    assert_eq!(batch(&[], 0, stream), 1);
    let data = pattern(8);
    let pageable = [(ptr, data.as_ptr().addr() as u64, 8)];
    assert_eq!(batch(&pageable, 0, stream), 801, "not from pageable memory here");
    assert_eq!(refused(card.context.synchronize()), 0);
    card.assert_no_violation();
}
