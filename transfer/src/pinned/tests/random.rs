//! Random programs of buffers and copies on several streams, with a model of every byte.

use aquifer_device::Code;
use aquifer_sim::Fault;
use proptest::prelude::*;

use super::*;
use crate::pinned::class;

const STREAMS: usize = 3;
/// The device memory of each stream, in bytes.
const PART: usize = 8 << 20;
const LIMIT: u64 = 24 << 20;

#[derive(Clone, Debug)]
enum Step {
    Alloc { bytes: usize },
    Register { bytes: usize },
    Drop { which: usize },
    Forget { which: usize },
    Upload { which: usize, stream: usize },
    Download { which: usize, stream: usize },
    Write { which: usize, value: u8 },
    Read { which: usize },
    Trim { bytes: u64 },
    Synchronize { stream: usize },
    Fault { nth: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let sizes = prop_oneof![Just(0), 1..5_000_usize, 1..200_000_usize, 1..PART];
    let (which, stream) = (any::<usize>(), 0..STREAMS);
    let step = prop_oneof![
        6 => sizes.prop_map(|bytes| Step::Alloc { bytes }),
        1 => (1..10_000_usize).prop_map(|bytes| Step::Register { bytes }),
        4 => which.prop_map(|which| Step::Drop { which }),
        1 => which.prop_map(|which| Step::Forget { which }),
        6 => (which, stream.clone()).prop_map(|(which, stream)| Step::Upload { which, stream }),
        6 => (which, stream.clone()).prop_map(|(which, stream)| Step::Download { which, stream }),
        3 => (which, any::<u8>()).prop_map(|(which, value)| Step::Write { which, value }),
        3 => which.prop_map(|which| Step::Read { which }),
        1 => (0..LIMIT).prop_map(|bytes| Step::Trim { bytes }),
        1 => stream.prop_map(|stream| Step::Synchronize { stream }),
        1 => (1..6_u64).prop_map(|nth| Step::Fault { nth }),
    ];
    proptest::collection::vec(step, 1..60)
}

/// A buffer, and the byte that all of it must be, where that is known.
struct Held {
    buffer: PinnedBuffer,
    value: Option<u8>,
    /// Whether it counts in the pool.
    pooled: bool,
}

struct Program {
    bench: Bench,
    streams: Vec<Stream>,
    /// For each stream, the length of the known prefix of its device memory, and its byte.
    device: Vec<(usize, u8)>,
    held: Vec<Held>,
    /// Classes of buffers that were forgotten.
    forgotten: Vec<u64>,
    faulty: bool,
}

impl Program {
    fn new() -> Program {
        let bench = Bench::limited(LIMIT);
        let streams = (0..STREAMS).map(|_| bench.device.stream().unwrap()).collect();
        let (held, forgotten) = Default::default();
        Program { bench, streams, device: vec![(0, 0); STREAMS], held, forgotten, faulty: false }
    }

    fn run(&mut self, step: &Step) -> Result<(), TransferError> {
        let Bench { device, memory, pool, .. } = &self.bench;
        let part = |stream: usize| memory.offset((stream * PART) as u64);
        let count = self.held.len();
        match *step {
            Step::Alloc { bytes } => {
                let buffer = pool.alloc::<u8>(bytes)?;
                self.held.push(Held { buffer, value: None, pooled: true });
            }
            Step::Register { bytes } => {
                let buffer = pool.register(vec![5_u8; bytes]).map_err(|returned| returned.error)?;
                self.held.push(Held { buffer, value: Some(5), pooled: false });
            }
            Step::Trim { bytes } => drop(pool.trim_to(bytes)?),
            Step::Synchronize { stream } => self.streams[stream].synchronize()?,
            Step::Fault { nth } => {
                self.faulty = true;
                self.bench.sim.inject(Fault::Nth { operation: None, nth, code: Code(999) });
            }
            _ if count == 0 => {}
            Step::Drop { which } => drop(self.held.swap_remove(which % count)),
            Step::Forget { which } => {
                let Held { buffer, pooled, .. } = self.held.swap_remove(which % count);
                if pooled && buffer.bytes() > 0 {
                    self.forgotten.push(class::round_up(buffer.bytes() as u64).unwrap());
                }
                std::mem::forget(buffer);
            }
            Step::Upload { which, stream } => {
                let Held { buffer, value, .. } = &self.held[which % count];
                let before = std::mem::take(&mut self.device[stream]);
                upload(buffer.as_slice().host(), part(stream), &self.streams[stream], device)?;
                self.device[stream] = match value {
                    Some(value) if before.1 == *value => (before.0.max(buffer.bytes()), *value),
                    Some(value) => (buffer.bytes(), *value),
                    None => (0, 0),
                };
            }
            Step::Download { which, stream } => {
                let Held { buffer, value, .. } = &mut self.held[which % count];
                *value = None;
                download(buffer.as_slice_mut().host(), part(stream), &self.streams[stream], device)?;
                let (known, byte) = self.device[stream];
                *value = (known >= buffer.bytes()).then_some(byte);
            }
            Step::Write { which, value } => {
                let held = &mut self.held[which % count];
                held.buffer.write()?.fill(value);
                held.value = Some(value);
            }
            Step::Read { which } => {
                let Held { buffer, value, .. } = &self.held[which % count];
                let bytes = buffer.read()?;
                assert!(value.is_none_or(|value| bytes.iter().all(|&byte| byte == value)), "{value:?}");
            }
        }
        Ok(())
    }

    fn check(&self) {
        let stats = self.bench.pool.stats();
        self.bench.pool.check();
        let live = self.held.iter().filter(|held| held.pooled && held.buffer.bytes() > 0);
        let live: u64 = live.map(|held| class::round_up(held.buffer.bytes() as u64).unwrap()).sum();
        let least = live + self.forgotten.iter().sum::<u64>();
        assert!(stats.active_bytes.current >= least && stats.active_bytes.current <= stats.allocated_bytes.current);
        assert!(stats.allocated_bytes.peak <= LIMIT);
        let starts = self.held.iter().filter(|held| held.buffer.bytes() > 0);
        let mut ranges: Vec<_> = starts.map(|held| (address(&held.buffer), held.buffer.bytes())).collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "buffers do not overlap");
    }

    /// Releases everything except for forgotten buffers.
    fn end(mut self) {
        self.bench.sim.clear_faults();
        for held in std::mem::take(&mut self.held) {
            let bytes = held.buffer.read().unwrap();
            assert!(held.value.is_none_or(|value| bytes.iter().all(|&byte| byte == value)));
        }
        // Covers ticks that a fault left uncovered.
        self.bench.pool.empty_cache().unwrap();
        self.bench.device.synchronize().unwrap();
        self.bench.pool.empty_cache().unwrap();
        let stats = self.bench.pool.stats();
        let least = self.forgotten.iter().sum::<u64>();
        // A full pool serves small requests from memory for larger ones.
        let most = self.forgotten.iter().map(|&class| class.max(class::PAGED)).sum::<u64>();
        assert!((least..=most).contains(&stats.active_bytes.current), "{stats:?}, of {least} to {most}");
        assert_eq!(stats.active_requests.current, self.forgotten.len() as u64);
        if self.forgotten.is_empty() {
            assert_eq!(stats.allocated_bytes.current, 0);
        }
        self.bench.device.settle();
        assert_eq!(self.bench.sim.take_violations(), []);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn random_programs_deliver_data_and_balance_memory(steps in steps()) {
        let mut program = Program::new();
        for step in &steps {
            match program.run(step) {
                Ok(()) | Err(TransferError::OutOfPinned { .. }) => {}
                Err(error) => prop_assert!(program.faulty, "{:?}: {}", step, error),
            }
            program.check();
        }
        program.end();
    }
}
