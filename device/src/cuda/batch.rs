//! Many copies with one call.

use super::copies::refuse_overlap;
use super::functions::Functions;
use super::gpu::Gpu;
use super::installation::check;
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
    let functions = gpu.context.functions();
    gpu.optional(operation, has_batches(functions).then_some(()))?;
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
    let _current = gpu.context.enter_relaxed(operation)?;
    let (count, raw) = (targets.len(), stream.raw);
    let (targets, sources, lengths) = (targets.as_mut_ptr(), sources.as_mut_ptr(), lengths.as_mut_ptr());
    // One description, from the first copy on.
    let (mut attributes, mut first, mut failed) = (CopyAttributes::in_stream_order(), 0, usize::MAX);
    let (attributes, first) = (&raw mut attributes, &raw mut first);
    // The call lost an argument with CUDA 13.
    let code = match (functions.cuMemcpyBatchAsync_v2, functions.cuMemcpyBatchAsync) {
        // SAFETY: all of it outlives the call; the three lists have one length, and their ranges
        // are live device memory, or page-locked memory for which the caller vouches; the stream
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

/// Whether the driver takes many copies at once.
pub(super) fn has_batches(functions: &Functions) -> bool {
    functions.cuMemcpyBatchAsync_v2.is_some() || functions.cuMemcpyBatchAsync.is_some()
}
