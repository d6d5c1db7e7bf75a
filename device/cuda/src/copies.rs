//! Copies and fills through the CUDA driver.
//!
//! Memory is pageable unless this driver allocated or registered it. CUDA copies pageable memory
//! through buffers of its own; where the device can reach the memory directly, CUDA may return
//! before it has read it. A copy here has read or written pageable memory when it returns, because
//! it waits for the stream first. It cannot be captured, because a graph would touch the memory
//! whenever it is launched.

use std::ffi::c_void;
use std::ptr;

use aquifer_device::internal::{Touched, first_overlap};
use aquifer_device::{Code, Copy2d, CopyEnd, CopyPart, DeviceError, DevicePtr, HostPtr, Operation, RawStream, Result};
use cudarc::driver::sys::{CUDA_MEMCPY2D, CUmemorytype};

use crate::functions::Functions;
use crate::gpu::Gpu;
use crate::installation::{bad_value, check, check_function};
use crate::objects::{LiveStream, Locked};
use crate::raw::{pointer, size};
use crate::shapes::CopyAttributes;
use crate::{captures, memory, streams};

impl Gpu {
    /// Enqueues a copy from host memory.
    ///
    /// # Safety
    /// As for [`aquifer_device::Driver::copy_to_device`].
    pub(crate) unsafe fn copy_to_device(
        &self,
        dst: DevicePtr,
        src: *const u8,
        bytes: usize,
        stream: RawStream,
    ) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { copy_host(self, Operation::CopyToDevice, dst, src, bytes, stream) }
    }

    /// Enqueues a copy to host memory.
    ///
    /// # Safety
    /// As for [`aquifer_device::Driver::copy_to_host`].
    pub(crate) unsafe fn copy_to_host(
        &self,
        dst: *mut u8,
        src: DevicePtr,
        bytes: usize,
        stream: RawStream,
    ) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { copy_host(self, Operation::CopyToHost, src, dst, bytes, stream) }
    }

    pub(crate) fn copy_on_device(&self, dst: DevicePtr, src: DevicePtr, bytes: u64, stream: RawStream) -> Result<()> {
        let operation = Operation::CopyOnDevice;
        let stream = streams::live(self, operation, stream)?;
        if bytes == 0 {
            return Ok(());
        }
        memory::check_memory(self, operation, dst, bytes)?;
        memory::check_memory(self, operation, src, bytes)?;
        if dst.0.abs_diff(src.0) < bytes {
            return Err(bad_value(operation, format!("{bytes} bytes at {dst} and at {src} overlap")));
        }
        // SAFETY: both ranges are live device memory.
        unsafe { copy_range(self, operation, CopyEnd::Device(dst), CopyEnd::Device(src), bytes, &stream) }
    }

    pub(crate) fn memset(&self, ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> Result<()> {
        let operation = Operation::Memset;
        let stream = streams::live(self, operation, stream)?;
        if bytes == 0 {
            return Ok(());
        }
        memory::check_memory(self, operation, ptr, bytes)?;
        // Relaxed: the first fill may load the kernel that makes it.
        let call = self.context.functions().cuMemsetD8Async;
        // SAFETY: the range is live device memory, and the stream lives (L1, F1).
        self.context.call(operation, |_| unsafe { call(ptr.0, value, size(bytes), stream.raw) })
    }

    /// Enqueues a copy of rows.
    ///
    /// # Safety
    /// As for [`aquifer_device::Driver::copy_2d`].
    pub(crate) unsafe fn copy_2d(&self, copy: &Copy2d, stream: RawStream) -> Result<()> {
        let operation = Operation::Copy2d;
        let call = self.optional(operation, self.context.functions().cuMemcpy2DAsync_v2)?;
        let stream = streams::live(self, operation, stream)?;
        let Copy2d { dst, dst_pitch, src, src_pitch, width, height } = *copy;
        if dst_pitch < width || src_pitch < width {
            let detail = format!("rows of {width} bytes at pitches of {dst_pitch} and {src_pitch}");
            return Err(bad_value(operation, detail));
        }
        if width == 0 || height == 0 {
            return Ok(());
        }
        check_ends(operation, dst, src)?;
        let mut spans = Vec::new();
        for (place, pitch, writes) in [(dst, dst_pitch, true), (src, src_pitch, false)] {
            let spanned = pitch.checked_mul(height - 1).and_then(|bytes| bytes.checked_add(width));
            let bytes = spanned.ok_or_else(|| bad_value(operation, format!("{height} rows of {pitch} bytes")))?;
            check_place(self, operation, place, bytes)?;
            spans.push(Touched::new(place, bytes, writes));
        }
        // Mostly the two ends cannot overlap, and then no row has to be looked at.
        if first_overlap(spans).is_some() {
            let rows = copy.rows().ok_or_else(|| bad_value(operation, "rows beyond the last address"))?;
            refuse_overlap(operation, rows.iter().flat_map(CopyPart::touched).collect())?;
        }
        if height == 1 || (dst_pitch == width && src_pitch == width) {
            // SAFETY: the ends were checked for all of the rows, and the caller vouches for those on
            // the host.
            return unsafe { copy_range(self, operation, dst, src, width * height, &stream) };
        }
        let end = |place| match place {
            CopyEnd::Device(ptr) => (CUmemorytype::CU_MEMORYTYPE_DEVICE, ptr.0),
            CopyEnd::Host(ptr) => (CUmemorytype::CU_MEMORYTYPE_HOST, ptr.0 as u64),
        };
        let ((dst_kind, dst), (src_kind, src)) = (end(dst), end(src));
        // Of the two addresses of an end the driver reads the one that its kind says.
        let copy = CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: src_kind,
            srcHost: pointer::<c_void>(src),
            srcDevice: src,
            srcArray: ptr::null_mut(),
            srcPitch: size(src_pitch),
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: dst_kind,
            dstHost: pointer(dst),
            dstDevice: dst,
            dstArray: ptr::null_mut(),
            dstPitch: size(dst_pitch),
            WidthInBytes: size(width),
            Height: size(height),
        };
        // SAFETY: the description outlives the call; its ranges are live device memory, or pinned
        // memory for which the caller vouches; the stream lives (L1, F1).
        self.context.call(operation, |_| unsafe { call(&raw const copy, stream.raw) })
    }

    /// Enqueues many copies.
    ///
    /// # Safety
    /// As for [`aquifer_device::Driver::copy_batch`].
    pub(crate) unsafe fn copy_batch(&self, copies: &[CopyPart], stream: RawStream) -> Result<()> {
        let operation = Operation::CopyBatch;
        let functions = self.context.functions();
        self.optional(operation, has_batches(functions).then_some(()))?;
        if stream.is_legacy() {
            return Err(DeviceError::refused(operation, Code::NOT_SUPPORTED)
                .with_detail("the driver takes no batches on the legacy default stream; use another stream"));
        }
        let stream = streams::live(self, operation, stream)?;
        captures::forbid_capture(self, operation, &stream, "copies in a batch cannot be captured")?;
        let (mut targets, mut sources, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        for copy in copies.iter().filter(|copy| copy.bytes > 0) {
            check_ends(operation, copy.dst, copy.src)?;
            for place in [copy.dst, copy.src] {
                check_place(self, operation, place, copy.bytes)?;
                check_address(self, operation, place)?;
            }
            // Places in the unified address space of host and device.
            let [target, source] = copy.touched();
            targets.push(target.range.start);
            sources.push(source.range.start);
            lengths.push(size(copy.bytes));
        }
        if targets.is_empty() {
            return Ok(());
        }
        refuse_overlap(operation, copies.iter().flat_map(CopyPart::touched).collect())?;
        let _current = self.context.enter_relaxed(operation)?;
        let (count, raw) = (targets.len(), stream.raw);
        let (targets, sources, lengths) = (targets.as_mut_ptr(), sources.as_mut_ptr(), lengths.as_mut_ptr());
        // One description, from the first copy on.
        let (mut attributes, mut first, mut failed) = (CopyAttributes::in_stream_order(), 0, usize::MAX);
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        // The call lost an argument with CUDA 13.
        let code = match (functions.cuMemcpyBatchAsync_v2, functions.cuMemcpyBatchAsync) {
            // SAFETY: all of it outlives the call; the three lists have one length, and their ranges
            // are live device memory, or pinned memory for which the caller vouches; the stream
            // lives (L1, F1).
            (Some(call), _) => unsafe { call(targets, sources, lengths, count, attributes, first, 1, raw) },
            (None, Some(call)) => {
                let failed = &raw mut failed;
                // SAFETY: as above.
                unsafe { call(targets, sources, lengths, count, attributes, first, 1, failed, raw) }
            }
            (None, None) => Code::NOT_SUPPORTED.0,
        };
        check(operation, code).map_err(|error| {
            if failed < count { error.with_detail(format!("copy {failed} of {}", copies.len())) } else { error }
        })
    }
}

/// Enqueues a copy from host memory, or to it if `operation` is [`Operation::CopyToHost`].
///
/// # Safety
/// As for [`aquifer_device::Driver::copy_to_device`] or [`aquifer_device::Driver::copy_to_host`].
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
        "copies of pageable memory cannot be captured; use pinned memory",
    )?;
    Ok(true)
}

/// Splits a copy from or to host memory into pieces each of which is pinned as a whole or not
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
fn finish_part(gpu: &Gpu, operation: Operation, stream: &LiveStream, enqueued: u64) {
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
/// [`aquifer_device::Driver::copy_to_device`] and [`aquifer_device::Driver::copy_to_host`]. At most
/// one end is on the host.
unsafe fn copy_range(
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

/// Refuses copies within the host, which the driver would make while the caller waits.
fn check_ends(operation: Operation, dst: CopyEnd, src: CopyEnd) -> Result<()> {
    if matches!((dst, src), (CopyEnd::Host(_), CopyEnd::Host(_))) {
        return Err(bad_value(operation, "both ends of a copy are on the host"));
    }
    Ok(())
}

/// Refuses an end of a copy that is neither live device memory nor within one piece of pinned
/// memory.
fn check_place(gpu: &Gpu, operation: Operation, place: CopyEnd, bytes: u64) -> Result<()> {
    match place {
        CopyEnd::Device(ptr) => memory::check_memory(gpu, operation, ptr, bytes),
        CopyEnd::Host(ptr) if !gpu.host.hold(ptr.0 as u64, bytes) => {
            let detail = format!("{bytes} bytes at {:#x} are not pinned memory of this device", ptr.0);
            Err(bad_value(operation, detail))
        }
        CopyEnd::Host(ptr) if gpu.host.piece(ptr.0 as u64, bytes) < bytes => {
            let detail = format!("{bytes} bytes at {:#x} lie in several pieces of pinned memory", ptr.0);
            Err(bad_value(operation, detail))
        }
        CopyEnd::Host(_) => Ok(()),
    }
}

fn refuse_overlap(operation: Operation, touched: Vec<Touched>) -> Result<()> {
    match first_overlap(touched) {
        None => Ok(()),
        Some(at) => Err(bad_value(operation, format!("a copy writes bytes that another one touches, at {at:#x}"))),
    }
}

/// Refuses memory that the device knows by another address than the host: here the driver takes
/// every address for one that both use, as it does not ask which an address is. The device would
/// fail to reach it.
fn check_address(gpu: &Gpu, operation: Operation, place: CopyEnd) -> Result<()> {
    match place {
        CopyEnd::Host(ptr)
            if !gpu.facts.registered_by_address && gpu.host.kind_at(ptr.0 as u64) == Some(Locked::Registered) =>
        {
            Err(DeviceError::refused(operation, Code::NOT_SUPPORTED).with_detail(
                "this device does not know registered memory by the host's address; copy it with a call of its own",
            ))
        }
        _ => Ok(()),
    }
}

/// Whether the driver takes many copies at once.
pub(crate) fn has_batches(functions: &Functions) -> bool {
    functions.cuMemcpyBatchAsync_v2.is_some() || functions.cuMemcpyBatchAsync.is_some()
}
