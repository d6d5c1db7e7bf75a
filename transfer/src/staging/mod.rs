//! Ordinary host memory on its way to the device and back, through page-locked chunks.

use std::sync::Arc;

use aquifer_allocator::Claim;
use aquifer_device::{AccessKind, DevicePtr, Stream, Tick};

use crate::error::TransferError;
use crate::job::Job;
use crate::pinned::{PinnedBuffer, PinnedPool, PinnedSlice, PinnedSliceMut};

/// Where bytes come from.
pub(crate) trait HostSource: Send + Sync {
    fn bytes(&self) -> u64;
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError>;
}

/// Where bytes go.
pub(crate) trait HostTarget: Send + Sync {
    fn bytes(&self) -> u64;
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError>;
}

const CHUNK: usize = 128 << 10;

/// Chunks that bytes pass through.
pub(crate) struct Staging(PinnedPool);

impl Staging {
    pub(crate) fn new(pool: &PinnedPool) -> Staging {
        Staging(pool.clone())
    }

    pub(crate) fn upload(
        &self,
        source: Arc<dyn HostSource>,
        to: Claim,
        ptr: DevicePtr,
        stream: &Stream,
    ) -> Result<Arc<Job>, TransferError> {
        let mut chunks = [self.0.alloc::<u8>(CHUNK)?, self.0.alloc::<u8>(CHUNK)?];
        let (bytes, mut at) = (source.bytes(), 0);
        for number in 0.. {
            let len = usize::try_from(bytes - at).unwrap_or(CHUNK).min(CHUNK);
            if len == 0 {
                break;
            }
            let chunk: &mut PinnedBuffer<u8> = &mut chunks[number % 2];
            source.read(at, &mut chunk.write()?[..len])?;
            let part = PinnedSlice::from(&*chunk).part();
            let device = to.turn(stream)?;
            let host = part.memory.turn(stream, AccessKind::Read)?;
            // SAFETY: the chunk is kept by its pool until the tick is done that its turn leaves, and not written before.
            #[allow(unsafe_code, reason = "the driver gets an address")]
            let copied = unsafe { stream.upload(ptr.offset(at), part.ptr, len) };
            drop((device, host));
            copied?;
            at += len as u64;
        }
        drop(to);
        let job = Job::new();
        job.enqueued(covered(stream));
        Ok(job)
    }

    pub(crate) fn download(
        &self,
        from: Claim,
        ptr: DevicePtr,
        target: Arc<dyn HostTarget>,
        stream: &Stream,
    ) -> Result<Arc<Job>, TransferError> {
        let mut chunk = self.0.alloc::<u8>(CHUNK)?;
        let (bytes, mut at) = (target.bytes(), 0);
        while at < bytes {
            let len = usize::try_from(bytes - at).unwrap_or(CHUNK).min(CHUNK);
            let part = PinnedSliceMut::from(&mut chunk).part();
            let device = from.turn(stream)?;
            let host = part.memory.turn(stream, AccessKind::Write)?;
            // SAFETY: the chunk is kept by its pool until the tick is done that its turn leaves, and not touched before.
            #[allow(unsafe_code, reason = "the driver gets an address")]
            let copied = unsafe { stream.download(part.ptr, ptr.offset(at), len) };
            drop((device, host));
            copied?;
            target.write(at, &chunk.read()?[..len])?;
            at += len as u64;
        }
        drop(from);
        let job = Job::new();
        job.finish(Ok(()));
        Ok(job)
    }
}

fn covered(stream: &Stream) -> Tick {
    let tick = stream.tick();
    if let Err(error) = tick.cover() {
        tracing::debug!(%error, "no event could be recorded after a copy");
    }
    tick
}
