//! The sizes of a ring, chosen from the speeds of a thread's copies and of the link.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_device::{AccessKind, Device, DeviceError, DevicePtr, Stream};

use super::config::{Sizes, StagingConfig};
use crate::error::TransferError;
use crate::foreign_code::guarded;
use crate::pinned::{PinnedBlock, PinnedPool};
use crate::timer::Timer;

/// Speeds in GB/s: bytes per ns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Speeds {
    /// The speed of one thread's copies in host memory.
    pub(super) copy: f64,
    /// The speed of the link to the device, each way.
    pub(super) link: f64,
}

impl Speeds {
    /// Used without measurements: the order of magnitude of one core, and a PCIe 5 link with 16
    /// lanes.
    pub(super) const ASSUMED: Speeds = Speeds { copy: 10.0, link: 55.0 };
}

/// Time for which the link should have work in one chunk, in ns: an order of magnitude more than
/// the calls about a chunk take.
const CHUNK_NS: f64 = 100_000.0;

/// The sizes for these speeds and cores.
///
/// Threads: enough that together they copy a quarter more than the link carries. Chunks: one for
/// each thread, three for the link, and one for other streams. Bytes: those that the link carries
/// in [`CHUNK_NS`], as a power of two from 1 to 16 MiB.
pub(super) fn plan(speeds: Speeds, cores: usize) -> Sizes {
    let whole = |value: f64, least: usize, most: usize| {
        let bounded = value.clamp(least as f64, most as f64);
        // NaN passes `clamp`.
        let bounded = if bounded.is_finite() { bounded } else { least as f64 };
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it lies between two numbers of this type"
        )]
        let whole = bounded as usize;
        whole
    };
    let threads = whole((1.25 * speeds.link / speeds.copy).ceil(), 1, cores.clamp(1, 8));
    let bytes = whole(speeds.link * CHUNK_NS, 1 << 20, 16 << 20);
    let power = if bytes.is_power_of_two() { bytes } else { bytes.next_power_of_two() / 2 };
    Sizes { chunk_bytes: power, chunks: threads + 4, threads }
}

/// The measured sizes; if the driver panics, those for the assumed speeds.
pub(super) fn or_assumed(choose: impl FnOnce() -> Sizes) -> Sizes {
    guarded("measuring for staged copies", || Ok(choose())).unwrap_or_else(|error: TransferError| {
        tracing::error!(%error, "staging is not tuned");
        plan(Speeds::ASSUMED, cores())
    })
}

fn cores() -> usize {
    #[cfg(test)]
    if let Some(cores) = super::tests::cores() {
        return cores;
    }
    thread::available_parallelism().map_or(1, usize::from)
}

/// The sizes for the device. Measures, which takes about 50 ms, mostly to prepare memory to
/// copy from, and at most about twice [`PATIENCE`]. Does not measure a virtual device, nor one
/// that captures, where it would break the capture, nor if all sizes are configured.
pub(super) fn choose(config: &StagingConfig, pool: &PinnedPool) -> Sizes {
    let device = pool.device();
    let speeds = if config.is_fixed() || device.info().is_virtual || device.is_capturing() {
        Speeds::ASSUMED
    } else {
        measure(pool).unwrap_or_else(|error| {
            tracing::debug!(%error, "the speed of staged copies could not be measured");
            Speeds::ASSUMED
        })
    };
    let sizes = plan(speeds, cores());
    tracing::debug!(?speeds, ?sizes, "staging was tuned");
    sizes
}

/// Bytes that are copied to measure the link, and pinned memory that host copies are measured
/// with, as large as a chunk.
const SAMPLE: usize = 4 << 20;

/// Bytes of ordinary memory that are read to measure a host copy: many times the size of a core's
/// cache.
const SOURCE: usize = 64 << 20;

/// The time after which preparing memory, or a copy, stops and is measured as far as it went.
const PATIENCE: Duration = Duration::from_millis(50);

/// Uses its own memory and stream, so that it waits for no work of the caller.
fn measure(pool: &PinnedPool) -> Result<Speeds, TransferError> {
    let mut sample = pool.alloc(SAMPLE, 1)?;
    let copy = measure_copy(&mut sample.write()?);
    let stream = pool.device().stream()?;
    let link = measure_link(pool.device(), &mut sample, &stream).unwrap_or_else(|error| {
        tracing::debug!(%error, "the speed of the link could not be measured");
        Speeds::ASSUMED.link
    });
    Ok(Speeds { copy, link })
}

/// The mean over one pass through ordinary memory, a chunk at a time into the same pinned
/// memory, as the ring's threads copy. One pass only: cached memory reads twice as fast as any
/// staged memory.
fn measure_copy(to: &mut [u8]) -> f64 {
    let Some(from) = source(to.len()) else { return Speeds::ASSUMED.copy };
    let start = Instant::now();
    let mut copied = 0;
    for piece in from.chunks_exact(to.len()) {
        to.copy_from_slice(black_box(piece));
        black_box(&mut *to);
        copied += piece.len();
        if start.elapsed() > PATIENCE {
            break;
        }
    }
    copied as f64 / start.elapsed().as_nanos().max(1) as f64
}

/// Up to [`SOURCE`] bytes, as a multiple of `piece`, written in order, so that the system has given
/// the memory and the first bytes left the caches first. `None` if there is no
/// memory.
fn source(piece: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(SOURCE).ok()?;
    let start = Instant::now();
    while bytes.len() + piece <= SOURCE && start.elapsed() <= PATIENCE {
        bytes.resize(bytes.len() + piece, 1);
    }
    Some(bytes)
}

fn measure_link(device: &Device, sample: &mut PinnedBlock, stream: &Stream) -> Result<f64, TransferError> {
    // From the driver's own pool: a plain allocation would wait for the device.
    let ptr = device.driver().alloc_async(sample.bytes() as u64, stream.raw())?;
    let measured = (0..3)
        .map(|_| time_upload(device, sample, ptr, stream))
        .try_fold(0.0_f64, |best, speed| speed.map(|speed| best.max(speed)));
    let freed: Result<(), DeviceError> = device.driver().free_async(ptr, stream.raw());
    if freed.is_err() {
        device.free_later(ptr);
    }
    let best = measured?;
    freed?;
    Ok(best)
}

#[allow(unsafe_code, reason = "a copy goes on after the call")]
fn time_upload(
    device: &Device,
    sample: &mut PinnedBlock,
    ptr: DevicePtr,
    stream: &Stream,
) -> Result<f64, TransferError> {
    let part = sample.all().host();
    let timer = Timer::start(device, stream)?;
    {
        let _access = part.memory.access(stream, AccessKind::Read)?;
        // SAFETY: the access notes the copy, and until that is done nothing writes the memory or
        // reuses it.
        unsafe { stream.upload(ptr, part.ptr, part.bytes) }?;
    }
    let time = timer.stop(stream)?.wait()?;
    Ok(part.bytes as f64 / (time.as_nanos() as f64).max(1.0))
}

#[cfg(test)]
mod tests {
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;
    use crate::pinned::PinnedConfig;

    #[test]
    fn sizes_follow_the_link_and_stay_within_bounds() {
        let plan_for = |copy, link| plan(Speeds { copy, link }, 64);
        assert_eq!(plan_for(10.0, 25.0), Sizes { chunk_bytes: 2 << 20, chunks: 8, threads: 4 });
        assert_eq!(plan_for(10.0, 55.0), Sizes { chunk_bytes: 4 << 20, chunks: 11, threads: 7 });
        assert_eq!(plan_for(100.0, 10.0), Sizes { chunk_bytes: 1 << 20, chunks: 5, threads: 1 });
        assert_eq!(plan(Speeds { copy: 10.0, link: 55.0 }, 2), Sizes { chunk_bytes: 4 << 20, chunks: 6, threads: 2 });
        for odd in [0.0, f64::NAN, f64::INFINITY, -1.0] {
            for sizes in [plan_for(odd, 25.0), plan_for(10.0, odd), plan_for(odd, odd)] {
                assert!((1..=8).contains(&sizes.threads) && (5..=12).contains(&sizes.chunks), "{odd}: {sizes:?}");
                assert!((1 << 20..=16 << 20).contains(&sizes.chunk_bytes), "{odd}: {sizes:?}");
            }
        }
    }

    #[test]
    fn measuring_finds_the_speed_of_the_link_and_frees_its_memory() {
        let sim = SimDriver::new(SimConfig::default().link_gb_s(20).jitter(false));
        let device = Device::new(sim.clone());
        let pool = PinnedPool::new(&device, PinnedConfig::default()).unwrap();
        let speeds = measure(&pool).unwrap();
        assert!((19.0..=20.0).contains(&speeds.link), "{speeds:?}");
        assert!(speeds.copy > 0.0);
        device.synchronize().unwrap();
        assert_eq!(device.memory_info().unwrap().free, device.info().total_bytes);
        assert!(device.driver().take_violation().is_none());
    }

    #[test]
    fn copies_are_measured_on_whole_pieces() {
        let all = source(SAMPLE).unwrap();
        assert!((SAMPLE..=SOURCE).contains(&all.len()) && all.len().is_multiple_of(SAMPLE), "{}", all.len());
        assert_eq!(source(SOURCE).unwrap().len(), SOURCE);
        let mut to = vec![0; SAMPLE];
        let copy = measure_copy(&mut to);
        assert!(copy > 0.0 && copy.is_finite(), "{copy}");
        assert!(to.iter().all(|&byte| byte == 1));
    }

    #[test]
    fn a_panic_while_measuring_gives_the_assumed_sizes() {
        assert_eq!(or_assumed(|| panic!("a driver's")), plan(Speeds::ASSUMED, cores()));
    }

    #[test]
    fn a_device_that_captures_is_not_measured() {
        let device = Device::new(SimDriver::new(SimConfig::default()));
        let pool = PinnedPool::new(&device, PinnedConfig::default()).unwrap();
        let capture = device.stream().unwrap();
        let capture = capture.begin_capture().unwrap();
        let calls = device.driver_calls();
        let sizes = choose(&StagingConfig::default(), &pool);
        assert_eq!(device.driver_calls().since(&calls).total(), 0);
        assert_eq!(sizes.chunk_bytes, 4 << 20);
        capture.end().unwrap();
    }
}
