//! Copies and fills.
//!
//! From or to pageable memory the driver copies through buffers of its own, and may return before it has read the memory where the
//! device can reach it directly. What such a copy promises here holds anyway: it waits for the stream before it returns. It
//! cannot be captured, because a graph would touch the memory whenever it is launched. Memory is pageable unless this
//! driver allocated or registered it.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys::{CUDA_MEMCPY2D, CUmemorytype};

use super::driver::CudaDriver;
use super::functions::Functions;
use super::installation::check;
use super::memory::bad_value;
use super::raw::{pointer, size};
use super::rows::touched_rows;
use super::shapes::CopyAttributes;
use super::streams::LiveStream;
use crate::copies::{Copy2d, CopyEnd, CopyPart, Touched, first_overlap};
use crate::driver::{DevicePtr, RawStream};
use crate::error::{Operation, Result};

impl CudaDriver {
    /// Enqueues a copy from host memory.
    ///
    /// # Safety
    /// As for [`crate::Driver::copy_to_device`].
    pub(super) unsafe fn copy_to_device(
        &self,
        dst: DevicePtr,
        src: *const u8,
        bytes: usize,
        stream: RawStream,
    ) -> Result<()> {
        let operation = Operation::CopyToDevice;
        let stream = self.stream(operation, stream)?;
        if bytes == 0 {
            return Ok(());
        }
        self.check_memory(operation, dst, bytes as u64)?;
        let pageable = self.is_pageable(operation, src, bytes, &stream)?;
        {
            let _current = self.core.enter(operation)?;
            let call = self.core.functions().cuMemcpyHtoDAsync_v2;
            // SAFETY: the target is live device memory, the caller vouches for the source, the stream lives (H1, F1).
            check(operation, unsafe { call(dst.0, src.cast(), bytes, stream.raw) })?;
        }
        if pageable { self.finish(operation, &stream) } else { Ok(()) }
    }

    /// Enqueues a copy to host memory.
    ///
    /// # Safety
    /// As for [`crate::Driver::copy_to_host`].
    pub(super) unsafe fn copy_to_host(
        &self,
        dst: *mut u8,
        src: DevicePtr,
        bytes: usize,
        stream: RawStream,
    ) -> Result<()> {
        let operation = Operation::CopyToHost;
        let stream = self.stream(operation, stream)?;
        if bytes == 0 {
            return Ok(());
        }
        self.check_memory(operation, src, bytes as u64)?;
        let pageable = self.is_pageable(operation, dst, bytes, &stream)?;
        {
            let _current = self.core.enter(operation)?;
            let call = self.core.functions().cuMemcpyDtoHAsync_v2;
            // SAFETY: the source is live device memory, the caller vouches for the target, the stream lives (H1, F1).
            check(operation, unsafe { call(dst.cast(), src.0, bytes, stream.raw) })?;
        }
        if pageable { self.finish(operation, &stream) } else { Ok(()) }
    }

    /// Whether host memory is pageable, in which case the stream must not capture.
    fn is_pageable(&self, operation: Operation, start: *const u8, bytes: usize, stream: &LiveStream) -> Result<bool> {
        if start.is_null() {
            return Err(bad_value(operation, "the host memory is at address 0"));
        }
        if self.host.hold(start.addr() as u64, bytes as u64) {
            return Ok(false);
        }
        self.forbid_capture(operation, stream, "copies of pageable memory cannot be captured; use page-locked memory")?;
        Ok(true)
    }

    /// Waits until a copy of pageable memory is done.
    fn finish(&self, operation: Operation, stream: &LiveStream) -> Result<()> {
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: the stream lives (H1, F1).
        check(operation, unsafe { (self.core.functions().cuStreamSynchronize)(stream.raw) })
    }

    pub(super) fn copy_on_device(&self, dst: DevicePtr, src: DevicePtr, bytes: u64, stream: RawStream) -> Result<()> {
        let operation = Operation::CopyOnDevice;
        let stream = self.stream(operation, stream)?;
        if bytes == 0 {
            return Ok(());
        }
        self.check_memory(operation, dst, bytes)?;
        self.check_memory(operation, src, bytes)?;
        if dst.0.abs_diff(src.0) < bytes {
            return Err(bad_value(operation, format!("{bytes} bytes at {dst} and at {src} overlap")));
        }
        let _current = self.core.enter(operation)?;
        let call = self.core.functions().cuMemcpyDtoDAsync_v2;
        // SAFETY: both ranges are live device memory, and the stream lives (H1, F1).
        check(operation, unsafe { call(dst.0, src.0, size(bytes), stream.raw) })
    }

    pub(super) fn memset(&self, ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> Result<()> {
        let operation = Operation::Memset;
        let stream = self.stream(operation, stream)?;
        if bytes == 0 {
            return Ok(());
        }
        self.check_memory(operation, ptr, bytes)?;
        let _current = self.core.enter(operation)?;
        let call = self.core.functions().cuMemsetD8Async;
        // SAFETY: the range is live device memory, and the stream lives (H1, F1).
        check(operation, unsafe { call(ptr.0, value, size(bytes), stream.raw) })
    }

    /// Enqueues a copy of rows.
    ///
    /// # Safety
    /// As for [`crate::Driver::copy_2d`].
    pub(super) unsafe fn copy_2d(&self, copy: &Copy2d, stream: RawStream) -> Result<()> {
        let operation = Operation::Copy2d;
        let call = self.optional(operation, self.core.functions().cuMemcpy2DAsync_v2)?;
        let stream = self.stream(operation, stream)?;
        let Copy2d { dst, dst_pitch, src, src_pitch, width, height } = *copy;
        if dst_pitch < width || src_pitch < width {
            let detail = format!("rows of {width} bytes at pitches of {dst_pitch} and {src_pitch}");
            return Err(bad_value(operation, detail));
        }
        if width == 0 || height == 0 {
            return Ok(());
        }
        self.check_ends(operation, dst, src)?;
        for (place, pitch) in [(dst, dst_pitch), (src, src_pitch)] {
            let spanned = pitch.checked_mul(height - 1).and_then(|bytes| bytes.checked_add(width));
            let bytes = spanned.ok_or_else(|| bad_value(operation, format!("{height} rows of {pitch} bytes")))?;
            self.check_place(operation, place, bytes)?;
        }
        refuse_overlap(operation, touched_rows(copy))?;
        let copy = CUDA_MEMCPY2D {
            dstPitch: size(dst_pitch),
            srcPitch: size(src_pitch),
            WidthInBytes: size(width),
            Height: size(height),
            ..ends(dst, src)
        };
        let _current = self.core.enter(operation)?;
        // SAFETY: the description outlives the call; its ranges are live device memory, or page-locked memory for which the
        // caller vouches; the stream lives (H1, F1).
        check(operation, unsafe { call(&raw const copy, stream.raw) })
    }

    /// Enqueues many copies.
    ///
    /// # Safety
    /// As for [`crate::Driver::copy_batch`].
    pub(super) unsafe fn copy_batch(&self, copies: &[CopyPart], stream: RawStream) -> Result<()> {
        let operation = Operation::CopyBatch;
        let batch = self.optional(operation, Batch::of(self.core.functions()))?;
        self.refuse_legacy(operation, stream)?;
        let stream = self.stream(operation, stream)?;
        self.forbid_capture(operation, &stream, "copies in a batch cannot be captured")?;
        let (mut targets, mut sources, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        for &CopyPart { dst, src, bytes } in copies.iter().filter(|copy| copy.bytes > 0) {
            self.check_ends(operation, dst, src)?;
            self.check_place(operation, dst, bytes)?;
            self.check_place(operation, src, bytes)?;
            targets.push(address(dst));
            sources.push(address(src));
            lengths.push(size(bytes));
        }
        if targets.is_empty() {
            return Ok(());
        }
        let touched = copies
            .iter()
            .flat_map(|copy| [Touched::new(copy.dst, copy.bytes, true), Touched::new(copy.src, copy.bytes, false)]);
        refuse_overlap(operation, touched.collect())?;
        let _current = self.core.enter(operation)?;
        // SAFETY: the three have one length; their ranges are live device memory, or page-locked memory for which the caller
        // vouches; the stream lives (H1).
        let result = unsafe { batch.enqueue(&mut targets, &mut sources, &mut lengths, &stream) };
        check(operation, result.0).map_err(|error| match result.1 {
            Some(at) => error.with_detail(format!("copy {at} of {}", copies.len())),
            None => error,
        })
    }

    /// Refuses copies within the host, which the driver would make at once, waiting.
    fn check_ends(&self, operation: Operation, dst: CopyEnd, src: CopyEnd) -> Result<()> {
        if matches!((dst, src), (CopyEnd::Host(_), CopyEnd::Host(_))) {
            return Err(bad_value(operation, "both ends of a copy are on the host"));
        }
        Ok(())
    }

    /// Refuses an end of a copy that is neither live device memory nor page-locked.
    fn check_place(&self, operation: Operation, place: CopyEnd, bytes: u64) -> Result<()> {
        match place {
            CopyEnd::Device(ptr) => self.check_memory(operation, ptr, bytes),
            CopyEnd::Host(ptr) if self.host.hold(ptr.0 as u64, bytes) => Ok(()),
            CopyEnd::Host(ptr) => {
                let detail = format!("{bytes} bytes at {:#x} are not page-locked memory of this device", ptr.0);
                Err(bad_value(operation, detail))
            }
        }
    }
}

fn refuse_overlap(operation: Operation, touched: Vec<Touched>) -> Result<()> {
    match first_overlap(touched) {
        None => Ok(()),
        Some(at) => Err(bad_value(operation, format!("a copy writes what another touches, at {at:#x}"))),
    }
}

/// A place in the unified address space of host and device.
fn address(place: CopyEnd) -> u64 {
    match place {
        CopyEnd::Device(ptr) => ptr.0,
        CopyEnd::Host(ptr) => ptr.0 as u64,
    }
}

/// A description of rows with both ends and nothing else set.
fn ends(dst: CopyEnd, src: CopyEnd) -> CUDA_MEMCPY2D {
    let kind = |place| match place {
        CopyEnd::Device(_) => CUmemorytype::CU_MEMORYTYPE_DEVICE,
        CopyEnd::Host(_) => CUmemorytype::CU_MEMORYTYPE_HOST,
    };
    let host = |place| match place {
        CopyEnd::Device(_) => ptr::null_mut::<c_void>(),
        CopyEnd::Host(ptr) => pointer(ptr.0 as u64),
    };
    let device = |place| match place {
        CopyEnd::Device(ptr) => ptr.0,
        CopyEnd::Host(_) => 0,
    };
    CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: kind(src),
        srcHost: host(src).cast_const(),
        srcDevice: device(src),
        srcArray: ptr::null_mut(),
        srcPitch: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: kind(dst),
        dstHost: host(dst),
        dstDevice: device(dst),
        dstArray: ptr::null_mut(),
        dstPitch: 0,
        WidthInBytes: 0,
        Height: 0,
    }
}

/// The driver's call for many copies, which lost an argument with CUDA 13.
#[derive(Clone, Copy)]
enum Batch {
    Since13(BatchSince13),
    Since12_8(BatchSince12_8),
}

type BatchSince13 =
    unsafe extern "C" fn(*mut u64, *mut u64, *mut usize, usize, *mut CopyAttributes, *mut usize, usize, Stream) -> u32;
type BatchSince12_8 = unsafe extern "C" fn(
    *mut u64,
    *mut u64,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    *mut usize,
    Stream,
) -> u32;
type Stream = cudarc::driver::sys::CUstream;

impl Batch {
    fn of(functions: &Functions) -> Option<Batch> {
        let newer = functions.cuMemcpyBatchAsync_v2.map(Batch::Since13);
        newer.or_else(|| functions.cuMemcpyBatchAsync.map(Batch::Since12_8))
    }

    /// Enqueues copies; the code, and which copy is at fault where the driver tells.
    ///
    /// # Safety
    /// The three must have one length and describe ranges that may be copied on this live stream.
    unsafe fn enqueue(
        self,
        targets: &mut [u64],
        sources: &mut [u64],
        lengths: &mut [usize],
        stream: &LiveStream,
    ) -> (u32, Option<usize>) {
        let count = targets.len();
        let (targets, sources, lengths) = (targets.as_mut_ptr(), sources.as_mut_ptr(), lengths.as_mut_ptr());
        // One description, from the first copy on.
        let (mut attributes, mut first, mut failed) = (CopyAttributes::in_stream_order(), 0, usize::MAX);
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        match self {
            Batch::Since13(call) => {
                // SAFETY: all of it outlives the call; the caller vouches for the copies (F1).
                let code = unsafe { call(targets, sources, lengths, count, attributes, first, 1, stream.raw) };
                (code, None)
            }
            Batch::Since12_8(call) => {
                let failed_at = &raw mut failed;
                // SAFETY: as above.
                let code =
                    unsafe { call(targets, sources, lengths, count, attributes, first, 1, failed_at, stream.raw) };
                (code, (failed < count).then_some(failed))
            }
        }
    }
}

/// Whether the driver takes many copies at once.
pub(super) fn has_batches(functions: &Functions) -> bool {
    Batch::of(functions).is_some()
}
