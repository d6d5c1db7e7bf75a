//! The allocator holds memory that the request cannot get.

use aquifer::Stream;
use aquifer::memory::PoolOptions;
use aquifer_allocator::size_class::LARGE_SEGMENT;

use super::stand::in_steps;
use super::{Stand, Story};
use crate::exit::Failure;
use crate::text::Bytes;

pub(super) fn fragmented(stand: &mut Stand) -> Result<Story, Failure> {
    const BLOCK: u64 = 4 << 20;
    // Five blocks share a segment.
    let segment = LARGE_SEGMENT;
    // At most half of the device, at least one segment, and no more blocks than can be verified
    // quickly.
    let segments = ((stand.room / 2).min(16 << 30) / segment).max(1);
    let weights = stand.fill("weights", stand.room.saturating_sub(segments * segment))?.end;
    for _ in 0..segments * (segment / BLOCK) {
        stand.mark("embeddings", BLOCK)?;
    }
    stand.free(|number| number >= weights && (number - weights) % 2 == 0);
    let refusal = stand.request(segments * segment / 8 * 3)?;
    let unharmed = stand.is_intact()?;
    let blocks = stand.blocks() - weights;
    stand.free(|number| number >= weights);
    let recovered = unharmed && stand.is_served(refusal.requested)?;
    Ok(Story { refusal, recovered_by: format!("freeing the {blocks} blocks in between"), recovered })
}

pub(super) fn pending(stand: &mut Stand) -> Result<Story, Failure> {
    let side: Stream = stand.allocator.device().stream()?;
    let bytes = in_steps(stand.percent(60));
    // There is memory for it once, but not twice.
    stand.fill("weights", stand.room - bytes - bytes / 3)?;
    let buffer = stand.allocator.alloc_bytes(bytes, &stand.stream)?;
    stand.stream.fill(buffer.ptr(), 1, bytes)?;
    side.wait_for(&stand.stream.tick())?;
    if let Some(simulator) = &stand.simulator {
        simulator.stall(side.raw(), std::time::Duration::from_millis(250))?;
    }
    side.fill(buffer.ptr(), 2, bytes)?;
    buffer.record_stream(&side)?;
    drop(buffer);
    let late = !side.is_idle()?;
    let waits = || stand.allocator.stats().cross_stream_waits;
    let waits_before = waits();
    let refusal = stand.request(bytes)?;
    let (own, stream) = (stand.stream.id(), side.id());
    let recovered_by = if waits() > waits_before {
        format!(
            "stream {own} waiting for stream {stream} on the device, which the allocator saw to; the host did not wait"
        )
    } else if late && side.is_idle()? {
        format!("waiting for stream {stream}, which the allocator did by itself")
    } else {
        format!("nothing: stream {stream} was done in time, or its memory was not needed")
    };
    let recovered = refusal.report.is_none() || stand.is_served(bytes)?;
    Ok(Story { refusal, recovered_by, recovered })
}

pub(super) fn private_pool(stand: &mut Stand) -> Result<Story, Failure> {
    let bytes = in_steps(stand.percent(60));
    stand.fill("weights", stand.room - bytes - bytes / 3)?;
    let pool = stand.allocator.create_pool(PoolOptions::default())?;
    let stream = stand.allocator.device().stream()?;
    let capture = stream.begin_capture()?;
    let route = stand.allocator.capture(&stream, &pool)?;
    let scratch = stand.allocator.alloc_bytes(bytes, &stream)?;
    stream.fill(scratch.ptr(), 1, scratch.bytes())?;
    drop((scratch, route));
    let graph = capture.end()?;
    graph.launch(&stream)?;
    let refusal = stand.request(in_steps(bytes / 6 * 5))?;
    let kept = stand.allocator.reserved_by_private_pools().get(&pool.id()).copied().unwrap_or(0);
    drop(graph);
    let recovered = stand.is_served(refusal.requested)?;
    let recovered_by = format!("dropping the graph that the pool kept {} for", Bytes(kept));
    Ok(Story { refusal, recovered_by, recovered })
}
