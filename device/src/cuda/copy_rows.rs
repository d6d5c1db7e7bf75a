//! Copies of rows through the CUDA driver.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys::{CUDA_MEMCPY2D, CUmemorytype};

use super::copies::refuse_overlap;
use super::gpu::Gpu;
use super::installation::{bad_value, check};
use super::raw::{pointer, size};
use super::{copies, streams};
use crate::copies::{Copy2d, CopyEnd, CopyPart, Touched, first_overlap};
use crate::driver::RawStream;
use crate::error::{Operation, Result};

/// Enqueues a copy of rows.
///
/// # Safety
/// As for [`crate::Driver::copy_2d`].
pub(super) unsafe fn copy_2d(gpu: &Gpu, copy: &Copy2d, stream: RawStream) -> Result<()> {
    let operation = Operation::Copy2d;
    let call = gpu.optional(operation, gpu.context.functions().cuMemcpy2DAsync_v2)?;
    let stream = streams::live(gpu, operation, stream)?;
    let Copy2d { dst, dst_pitch, src, src_pitch, width, height } = *copy;
    if dst_pitch < width || src_pitch < width {
        let detail = format!("rows of {width} bytes at pitches of {dst_pitch} and {src_pitch}");
        return Err(bad_value(operation, detail));
    }
    if width == 0 || height == 0 {
        return Ok(());
    }
    copies::check_ends(operation, dst, src)?;
    let mut spans = Vec::new();
    for (place, pitch, writes) in [(dst, dst_pitch, true), (src, src_pitch, false)] {
        let spanned = pitch.checked_mul(height - 1).and_then(|bytes| bytes.checked_add(width));
        let bytes = spanned.ok_or_else(|| bad_value(operation, format!("{height} rows of {pitch} bytes")))?;
        copies::check_place(gpu, operation, place, bytes)?;
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
        return unsafe { copies::copy_range(gpu, operation, dst, src, width * height, &stream) };
    }
    let copy = CUDA_MEMCPY2D {
        dstPitch: size(dst_pitch),
        srcPitch: size(src_pitch),
        WidthInBytes: size(width),
        Height: size(height),
        ..ends(dst, src)
    };
    let _current = gpu.context.enter_relaxed(operation)?;
    // SAFETY: the description outlives the call; its ranges are live device memory, or page-locked
    // memory for which the caller vouches; the stream lives (L1, F1).
    check(operation, unsafe { call(&raw const copy, stream.raw) })
}

/// A description of a copy of rows in which only the two ends are set.
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
