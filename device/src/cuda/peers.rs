//! Calls in which two devices take part: waiting for another one's event, and copying from its memory.
//!
//! Handles and ranges are checked on both sides, each by the driver that they belong to, and what the peer gave for them is held
//! until the call returns (L1). A copy works without access between the devices: the driver then goes through the host. Where
//! they can have it, it is enabled once for each pair before the first copy between plain allocations, which are out of reach without
//! it. It says nothing of mapped memory, whose access is set with its mappings; no document says how the driver copies mapped memory that a
//! peer cannot access once the contexts can, so such copies do not ask for it.
//!
//! Locks: that of the pairs is held across the driver's call that enables one, and nothing else is taken under it.

use std::ptr;
use std::sync::{Arc, Weak};

use crate::fork::Mutex;

use super::context::Core;
use super::driver::CudaDriver;
use super::installation::{check, check_function};
use super::memory::bad_value;
use super::raw::{pointer, size};
use crate::driver::{DevicePtr, Driver, RawEvent, RawStream};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::label::DeviceLabel;

/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
const ALREADY_ENABLED: Code = Code(704);

/// Contexts that were asked for access to their memory, whatever came of it.
#[derive(Debug, Default)]
pub(super) struct Peers(Mutex<Vec<Weak<Core>>>);

/// The driver of the same kind behind a peer.
fn cuda(operation: Operation, peer: &dyn Driver) -> Result<&CudaDriver> {
    let driver = peer.as_any().and_then(|driver| driver.downcast_ref());
    driver.ok_or_else(|| {
        let detail = "the peer is not driven by CUDA; devices of two kinds share nothing: go through the host";
        bad_value(operation, detail)
    })
}

impl CudaDriver {
    pub(super) fn wait_peer(&self, stream: RawStream, peer: &dyn Driver, event: RawEvent) -> Result<()> {
        let operation = Operation::Wait;
        let event = cuda(operation, peer)?.event(operation, event)?;
        let stream = self.stream(operation, stream)?;
        let _current = self.core.enter(operation)?;
        // SAFETY: event and stream live (L1, F1), and an event may be of another context; 0 are the only flags.
        check(operation, unsafe { (self.core.functions().cuStreamWaitEvent)(stream.raw, pointer(event.raw()), 0) })
    }

    pub(super) fn copy_peer(
        &self,
        dst: DevicePtr,
        peer: &dyn Driver,
        src: DevicePtr,
        bytes: u64,
        stream: RawStream,
    ) -> Result<()> {
        let operation = Operation::CopyPeer;
        let copy = self.optional(operation, self.core.functions().cuMemcpyPeerAsync)?;
        let peer = cuda(operation, peer)?;
        let stream = self.stream(operation, stream)?;
        if bytes == 0 {
            return Ok(());
        }
        self.forbid_capture(operation, &stream, "copies between devices cannot be captured")?;
        self.check_memory(operation, dst, bytes)?;
        peer.check_memory(operation, src, bytes).map_err(|error| {
            let label = DeviceLabel::from(&peer.info);
            error.with_detail(format!("{bytes} bytes at {src} are not all live memory of the peer, {label}"))
        })?;
        if ptr::eq(self, peer) && dst.0.abs_diff(src.0) < bytes {
            return Err(bad_value(operation, format!("{bytes} bytes at {dst} and at {src} overlap")));
        }
        if self.memory.hold(dst.0, bytes) && peer.memory.hold(src.0, bytes) {
            self.reach(peer);
        }
        let (to, from) = (self.core.handle(), peer.core.handle());
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: both ranges are live memory of their devices, whose contexts live as long as their drivers (C1), and the
        // stream lives (L1, F1).
        check(operation, unsafe { copy(dst.0, to, src.0, from, size(bytes), stream.raw) })
    }

    /// Lets this device reach the plain memory of another one, if it can and was not let before. If that fails, copies take the
    /// way through the host.
    fn reach(&self, peer: &CudaDriver) {
        let mut asked = self.peers.0.lock();
        let is_peer = |core: &Weak<Core>| ptr::eq(core.as_ptr(), Arc::as_ptr(&peer.core));
        if ptr::eq(self, peer) || asked.iter().any(is_peer) {
            return;
        }
        // A context that is gone had an object of its own, whose place none that is alive has.
        asked.retain(|core| core.strong_count() > 0);
        asked.push(Arc::downgrade(&peer.core));
        match self.enable(peer) {
            Ok(()) => {}
            Err(error) => {
                let peer = peer.info.ordinal;
                tracing::debug!(%error, peer, "no access to a peer's memory; copies from it go through the host");
            }
        }
    }

    fn enable(&self, peer: &CudaDriver) -> Result<()> {
        let operation = Operation::CopyPeer;
        if !self.can_access_peer(peer.info.ordinal)? {
            return Err(DeviceError::refused(operation, Code(217)).with_detail("the device cannot access the peer"));
        }
        let enable = self.optional(operation, self.core.functions().cuCtxEnablePeerAccess)?;
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: both contexts live (C1, F1); 0 are the only flags.
        match Code(unsafe { enable(peer.core.handle(), 0) }) {
            ALREADY_ENABLED => Ok(()),
            Code(code) => check_function(operation, "cuCtxEnablePeerAccess", code),
        }
    }
}
