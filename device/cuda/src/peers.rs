//! Copies from the memory of another device.
//!
//! Ranges are checked on both sides, each by the driver that they belong to. A copy works without
//! access between the devices: the driver then goes through the host. Where they can have it, it is
//! enabled once for each pair before the first copy between plain allocations, which are out of
//! reach without it. It says nothing of mapped memory, whose access is set with its mappings; no
//! document says how the driver copies mapped memory that a peer cannot access once the contexts
//! can, so such copies do not ask for it.
//!
//! Locks: that of the pairs is held across the driver's call that enables one, and nothing else is
//! taken under it.

use std::ptr;
use std::sync::{Arc, Weak};

use aquifer_device::{Code, DeviceError, DeviceLabel, DevicePtr, Operation, RawStream, Result};

use crate::context::GpuContext;
use crate::gpu::Gpu;
use crate::installation::{bad_value, check_function};
use crate::raw::size;
use crate::{captures, memory, streams};

/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
const ALREADY_ENABLED: Code = Code(704);

pub(crate) fn copy_peer(
    gpu: &Gpu,
    dst: DevicePtr,
    peer: &Gpu,
    src: DevicePtr,
    bytes: u64,
    stream: RawStream,
) -> Result<()> {
    let operation = Operation::CopyPeer;
    let copy = gpu.optional(operation, gpu.context.functions().cuMemcpyPeerAsync)?;
    let stream = streams::live(gpu, operation, stream)?;
    if bytes == 0 {
        return Ok(());
    }
    captures::forbid_capture(gpu, operation, &stream, "copies between devices cannot be captured")?;
    memory::check_memory(gpu, operation, dst, bytes)?;
    memory::check_memory(peer, operation, src, bytes).map_err(|error| {
        let label = DeviceLabel::from(&peer.info);
        error.with_detail(format!("{bytes} bytes at {src} are not all live memory of the peer, {label}"))
    })?;
    if ptr::eq(gpu, peer) && dst.0.abs_diff(src.0) < bytes {
        return Err(bad_value(operation, format!("{bytes} bytes at {dst} and at {src} overlap")));
    }
    if gpu.memory.hold(dst.0, bytes) && peer.memory.hold(src.0, bytes) {
        reach(gpu, peer);
    }
    let (to, from) = (gpu.context.handle(), peer.context.handle());
    // SAFETY: both ranges are live memory of their devices, whose contexts live as long as their
    // drivers (C1), and the stream lives (L1, F1).
    gpu.context.call(operation, |_| unsafe { copy(dst.0, to, src.0, from, size(bytes), stream.raw) })
}

/// Enables access to the plain memory of another device, if that is possible and was not tried
/// before. Without it, copies go through the host.
fn reach(gpu: &Gpu, peer: &Gpu) {
    let mut asked = gpu.peers.lock();
    let is_peer = |context: &Weak<GpuContext>| ptr::eq(context.as_ptr(), Arc::as_ptr(&peer.context));
    if ptr::eq(gpu, peer) || asked.iter().any(is_peer) {
        return;
    }
    // A context that is gone had an object of its own, whose place none that is alive has.
    asked.retain(|context| context.strong_count() > 0);
    asked.push(Arc::downgrade(&peer.context));
    match enable(gpu, peer) {
        Ok(()) => {}
        Err(error) => {
            let peer = peer.info.ordinal;
            tracing::debug!(%error, peer, "no access to a peer's memory; copies from it go through the host");
        }
    }
}

fn enable(gpu: &Gpu, peer: &Gpu) -> Result<()> {
    let operation = Operation::CopyPeer;
    if !gpu.can_access_peer(peer.info.ordinal)? {
        return Err(DeviceError::refused(operation, Code(217)).with_detail("the device cannot access the peer"));
    }
    let enable = gpu.optional(operation, gpu.context.functions().cuCtxEnablePeerAccess)?;
    let _current = gpu.context.enter_relaxed(operation)?;
    // SAFETY: both contexts live (C1, F1); 0 are the only flags.
    match Code(unsafe { enable(peer.context.handle(), 0) }) {
        ALREADY_ENABLED => Ok(()),
        Code(code) => check_function(operation, "cuCtxEnablePeerAccess", code),
    }
}
