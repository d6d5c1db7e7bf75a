//! Many copies with one call.

use super::copies::refuse_overlap;
use super::functions::Functions;
use super::gpu::Gpu;
use super::installation::check;
use super::objects::LiveStream;
use super::objects::Locked;
use super::raw::size;
use super::shapes::CopyAttributes;
use super::{captures, copies, memory, streams};
use crate::copies::{CopyEnd, CopyPart};
use crate::driver::RawStream;
use crate::error::{Code, DeviceError, Operation, Result};

/// Enqueues many copies.
///
/// # Safety
/// As for [`crate::Driver::copy_batch`].
pub(super) unsafe fn copy_batch(gpu: &Gpu, copies: &[CopyPart], stream: RawStream) -> Result<()> {
    let operation = Operation::CopyBatch;
    let batch = gpu.optional(operation, Batch::of(gpu.core.functions()))?;
    memory::refuse_legacy(operation, stream)?;
    let stream = streams::live(gpu, operation, stream)?;
    captures::forbid_capture(gpu, operation, &stream, "copies in a batch cannot be captured")?;
    let (mut targets, mut sources, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
    for &CopyPart { dst, src, bytes } in copies.iter().filter(|copy| copy.bytes > 0) {
        copies::check_ends(operation, dst, src)?;
        copies::check_place(gpu, operation, dst, bytes)?;
        copies::check_place(gpu, operation, src, bytes)?;
        check_address(gpu, operation, dst)?;
        check_address(gpu, operation, src)?;
        targets.push(address(dst));
        sources.push(address(src));
        lengths.push(size(bytes));
    }
    if targets.is_empty() {
        return Ok(());
    }
    refuse_overlap(operation, copies.iter().flat_map(CopyPart::touched).collect())?;
    let _current = gpu.core.enter_relaxed(operation)?;
    // SAFETY: the three have one length; their ranges are live device memory, or page-locked memory
    // for which the caller vouches; the stream lives (L1).
    let result = unsafe { batch.enqueue(&mut targets, &mut sources, &mut lengths, &stream) };
    check(operation, result.0).map_err(|error| match result.1 {
        Some(at) => error.with_detail(format!("copy {at} of {}", copies.len())),
        None => error,
    })
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

/// A place in the unified address space of host and device.
fn address(place: CopyEnd) -> u64 {
    match place {
        CopyEnd::Device(ptr) => ptr.0,
        CopyEnd::Host(ptr) => ptr.0 as u64,
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
                let (failed_at, stream) = (&raw mut failed, stream.raw);
                // SAFETY: all of it outlives the call; the caller vouches for the copies (F1).
                let code = unsafe { call(targets, sources, lengths, count, attributes, first, 1, failed_at, stream) };
                (code, (failed < count).then_some(failed))
            }
        }
    }
}

/// Whether the driver takes many copies at once.
pub(super) fn has_batches(functions: &Functions) -> bool {
    Batch::of(functions).is_some()
}
