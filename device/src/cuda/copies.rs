//! Copies of one range, and fills, through the CUDA driver.
//!
//! Memory is pageable unless this driver allocated or registered it. CUDA copies pageable memory
//! through buffers of its own; where the device can reach the memory directly, CUDA may return
//! before it has read it. A copy here has read or written pageable memory when it returns, because
//! it waits for the stream first. It cannot be captured, because a graph would touch the memory
//! whenever it is launched. Copies of rows (`copy_rows.rs`) and batches (`batch.rs`) have files of
//! their own.

use std::ffi::c_void;

use super::gpu::Gpu;
use super::installation::{bad_value, check, check_function};
use super::objects::LiveStream;
use super::raw::{pointer, size};
use super::{captures, memory, streams};
use crate::copies::{CopyEnd, Touched, first_overlap};
use crate::driver::{DevicePtr, HostPtr, RawStream};
use crate::error::{Code, Operation, Result};

/// Enqueues a copy from host memory.
///
/// # Safety
/// As for [`crate::Driver::copy_to_device`].
pub(super) unsafe fn copy_to_device(
    gpu: &Gpu,
    dst: DevicePtr,
    src: *const u8,
    bytes: usize,
    stream: RawStream,
) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { copy_host(gpu, Operation::CopyToDevice, dst, src, bytes, stream) }
}

/// Enqueues a copy to host memory.
///
/// # Safety
/// As for [`crate::Driver::copy_to_host`].
pub(super) unsafe fn copy_to_host(
    gpu: &Gpu,
    dst: *mut u8,
    src: DevicePtr,
    bytes: usize,
    stream: RawStream,
) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { copy_host(gpu, Operation::CopyToHost, src, dst, bytes, stream) }
}

/// Enqueues a copy from host memory, or to it if `operation` is [`Operation::CopyToHost`].
///
/// # Safety
/// As for [`crate::Driver::copy_to_device`] or [`crate::Driver::copy_to_host`].
unsafe fn copy_host(
    gpu: &Gpu,
    operation: Operation,
    ptr: DevicePtr,
    host: *const u8,
    bytes: usize,
    stream: RawStream,
) -> Result<()> {
    let stream = streams::live(gpu, operation, stream)?;
    if bytes == 0 {
        return Ok(());
    }
    memory::check_memory(gpu, operation, ptr, bytes as u64)?;
    let pageable = is_pageable(gpu, operation, host, bytes, &stream)?;
    by_piece(gpu, operation, host, bytes, &stream, |at, bytes| {
        let on_device = CopyEnd::Device(DevicePtr(ptr.0 + at));
        let on_host = CopyEnd::Host(HostPtr(host.expose_provenance() + size(at)));
        let (dst, src) = if operation == Operation::CopyToHost { (on_host, on_device) } else { (on_device, on_host) };
        // SAFETY: one end is live device memory, and the caller vouches for the other.
        unsafe { copy_range(gpu, operation, dst, src, bytes, &stream) }
    })?;
    if pageable { finish(gpu, operation, &stream) } else { Ok(()) }
}

/// True if host memory is pageable. Fails if it is and the stream captures.
fn is_pageable(gpu: &Gpu, operation: Operation, start: *const u8, bytes: usize, stream: &LiveStream) -> Result<bool> {
    if start.is_null() {
        return Err(bad_value(operation, "the host memory is at address 0"));
    }
    if gpu.host.hold(start.addr() as u64, bytes as u64) {
        return Ok(false);
    }
    captures::forbid_capture(
        gpu,
        operation,
        stream,
        "copies of pageable memory cannot be captured; use page-locked memory",
    )?;
    Ok(true)
}

/// Splits a copy from or to host memory into pieces each of which is page-locked as a whole or not
/// at all, because the driver takes no others (CUDA driver API, “API synchronization behavior”).
/// Calls `copy` with the offset and length of each, and stops at the first that fails.
fn by_piece(
    gpu: &Gpu,
    operation: Operation,
    start: *const u8,
    bytes: usize,
    stream: &LiveStream,
    copy: impl Fn(u64, u64) -> Result<()>,
) -> Result<()> {
    let (start, bytes) = (start.addr() as u64, bytes as u64);
    let mut done = 0;
    while done < bytes {
        let piece = gpu.host.piece(start + done, bytes - done);
        copy(done, piece).inspect_err(|_| finish_part(gpu, operation, stream, done))?;
        done += piece;
    }
    Ok(())
}

/// Waits for the part of a failed copy that was enqueued, because a caller that gets an error takes
/// the memory for unused. Does nothing in a capture, where nothing runs.
pub(super) fn finish_part(gpu: &Gpu, operation: Operation, stream: &LiveStream, enqueued: u64) {
    if enqueued == 0 || captures::forbid_capture(gpu, operation, stream, "part of a copy is in the graph").is_err() {
        return;
    }
    if let Err(error) = finish(gpu, operation, stream) {
        tracing::debug!(%error, "part of a copy that failed could not be waited for");
    }
}

/// Enqueues a copy of one range. Enters the context in the relaxed capture mode, because the driver
/// may wait for other work if the memory is pageable.
///
/// # Safety
/// An end on the device is live device memory. For an end on the host the caller vouches as for
/// [`crate::Driver::copy_to_device`] and [`crate::Driver::copy_to_host`]. At most one end is on the
/// host.
pub(super) unsafe fn copy_range(
    gpu: &Gpu,
    operation: Operation,
    dst: CopyEnd,
    src: CopyEnd,
    bytes: u64,
    stream: &LiveStream,
) -> Result<()> {
    let (functions, bytes) = (gpu.context.functions(), size(bytes));
    let _current = gpu.context.enter_relaxed(operation)?;
    let code = match (dst, src) {
        (CopyEnd::Device(dst), CopyEnd::Host(src)) => {
            let src: *const c_void = pointer::<c_void>(src.0 as u64);
            // SAFETY: the caller vouches for both ends, and the stream lives (L1, F1).
            unsafe { (functions.cuMemcpyHtoDAsync_v2)(dst.0, src, bytes, stream.raw) }
        }
        (CopyEnd::Host(dst), CopyEnd::Device(src)) => {
            // SAFETY: the caller vouches for both ends, and the stream lives (L1, F1).
            unsafe { (functions.cuMemcpyDtoHAsync_v2)(pointer(dst.0 as u64), src.0, bytes, stream.raw) }
        }
        (CopyEnd::Device(dst), CopyEnd::Device(src)) => {
            // SAFETY: the caller vouches for both ends, and the stream lives (L1, F1).
            unsafe { (functions.cuMemcpyDtoDAsync_v2)(dst.0, src.0, bytes, stream.raw) }
        }
        (CopyEnd::Host(_), CopyEnd::Host(_)) => Code::INVALID_VALUE.0,
    };
    check(operation, code)
}

/// Waits until a copy of pageable memory is done.
fn finish(gpu: &Gpu, operation: Operation, stream: &LiveStream) -> Result<()> {
    let _current = gpu.context.enter_relaxed(operation)?;
    // SAFETY: the stream lives (L1, F1).
    let code = unsafe { (gpu.context.functions().cuStreamSynchronize)(stream.raw) };
    check_function(operation, "cuStreamSynchronize", code)
}

pub(super) fn copy_on_device(gpu: &Gpu, dst: DevicePtr, src: DevicePtr, bytes: u64, stream: RawStream) -> Result<()> {
    let operation = Operation::CopyOnDevice;
    let stream = streams::live(gpu, operation, stream)?;
    if bytes == 0 {
        return Ok(());
    }
    memory::check_memory(gpu, operation, dst, bytes)?;
    memory::check_memory(gpu, operation, src, bytes)?;
    if dst.0.abs_diff(src.0) < bytes {
        return Err(bad_value(operation, format!("{bytes} bytes at {dst} and at {src} overlap")));
    }
    // SAFETY: both ranges are live device memory.
    unsafe { copy_range(gpu, operation, CopyEnd::Device(dst), CopyEnd::Device(src), bytes, &stream) }
}

pub(super) fn memset(gpu: &Gpu, ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> Result<()> {
    let operation = Operation::Memset;
    let stream = streams::live(gpu, operation, stream)?;
    if bytes == 0 {
        return Ok(());
    }
    memory::check_memory(gpu, operation, ptr, bytes)?;
    // Relaxed: the first fill may load the kernel that makes it.
    let _current = gpu.context.enter_relaxed(operation)?;
    let call = gpu.context.functions().cuMemsetD8Async;
    // SAFETY: the range is live device memory, and the stream lives (L1, F1).
    check(operation, unsafe { call(ptr.0, value, size(bytes), stream.raw) })
}

/// Refuses copies within the host, which the driver would make while the caller waits.
pub(super) fn check_ends(operation: Operation, dst: CopyEnd, src: CopyEnd) -> Result<()> {
    if matches!((dst, src), (CopyEnd::Host(_), CopyEnd::Host(_))) {
        return Err(bad_value(operation, "both ends of a copy are on the host"));
    }
    Ok(())
}

/// Refuses an end of a copy that is neither live device memory nor within one piece of page-locked
/// memory.
pub(super) fn check_place(gpu: &Gpu, operation: Operation, place: CopyEnd, bytes: u64) -> Result<()> {
    match place {
        CopyEnd::Device(ptr) => memory::check_memory(gpu, operation, ptr, bytes),
        CopyEnd::Host(ptr) if !gpu.host.hold(ptr.0 as u64, bytes) => {
            let detail = format!("{bytes} bytes at {:#x} are not page-locked memory of this device", ptr.0);
            Err(bad_value(operation, detail))
        }
        CopyEnd::Host(ptr) if gpu.host.piece(ptr.0 as u64, bytes) < bytes => {
            let detail = format!("{bytes} bytes at {:#x} lie in several pieces of page-locked memory", ptr.0);
            Err(bad_value(operation, detail))
        }
        CopyEnd::Host(_) => Ok(()),
    }
}

pub(super) fn refuse_overlap(operation: Operation, touched: Vec<Touched>) -> Result<()> {
    match first_overlap(touched) {
        None => Ok(()),
        Some(at) => Err(bad_value(operation, format!("a copy writes bytes that another one touches, at {at:#x}"))),
    }
}
