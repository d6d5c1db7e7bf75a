//! The time of a pair of an allocation and a free, beside the yardstick.
//!
//! Sizes, and which blocks are freed, are drawn before the clock starts. The allocator and the
//! yardstick run the same pairs alternately, round by round, so that other load on the machine
//! affects both; medians are reported. Runs of several threads also alternate with one thread
//! alone, so that their rates are comparable.
//!
//! * `hot_512b`, `hot_1mib`, `hot_64mib`: a block is freed as soon as it is allocated.
//! * `churn_N`: N live blocks of 512 B to 64 MiB (log-uniform; 100000 of at most 1 MiB, 1000000 of
//!   at most 64 KiB); a random one is replaced.
//! * `threadsN_streamsN`, `threadsN_churn`: N threads on one allocator, each with a stream of its
//!   own, as `hot_1mib` or with 100 live blocks of 512 B to 1 MiB each. The yardstick, which has no
//!   locks, has an instance for each thread.
//! * `handover`: one thread allocates, another frees, through a ring; the yardstick is behind a
//!   lock. The rate is that of one thread that passes blocks through the ring to itself.
//! * `raw_*`: as `hot_1mib`, `churn_10000` and `threads2_streams2`, also with 8 threads, with raw
//!   pointers; the yardstick is the same with handles.
//!
//! A simulated device has at least 512 GiB. Where a real one has no room for so many, blocks are
//! smaller: `largest_bytes` says which.

use aquifer::Device;
use aquifer::device::DevicePtr;
use aquifer_stress::exit::Failure;
use aquifer_stress::opened::Opened;
use aquifer_stress::session::Session;
use aquifer_stress::text::Bytes;
use aquifer_trace::{Aquifer, Refused, Subject, Times, Yardstick};

use crate::handover::{self, HandOver, Shared};
use crate::row::Row;
use crate::team::{Replacers, Team};
use crate::workload::{Replacements, Sizes};
use crate::{Bench, Benchmark};

/// The least memory of a simulated device, so that memory does not run out.
pub(crate) const SIMULATED_BYTES: u64 = 512 << 30;
/// Measured rounds of each benchmark. They are many, and shorter than a time slice of the operating
/// system (1 ms), so that most of them run undisturbed even on a busy machine.
const ROUNDS: usize = 301;

/// The work of the threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Each replaces blocks of its own.
    Replace,
    /// One allocates, the other frees.
    HandOver,
    /// As `Replace`, with raw pointers; the yardstick is the same allocator with handles.
    Raw,
}

use Kind::{HandOver as Handed, Raw as Pointers, Replace};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Name, work, threads, live blocks of each, smallest and largest size.
const ALL: [(&str, Kind, u32, u32, u64, u64); 19] = [
    ("hot_512b", Replace, 1, 1, 512, 512),
    ("hot_1mib", Replace, 1, 1, MIB, MIB),
    ("hot_64mib", Replace, 1, 1, 64 * MIB, 64 * MIB),
    ("churn_100", Replace, 1, 100, 512, 64 * MIB),
    ("churn_1000", Replace, 1, 1_000, 512, 64 * MIB),
    ("churn_10000", Replace, 1, 10_000, 512, 64 * MIB),
    ("churn_100000", Replace, 1, 100_000, 512, MIB),
    ("churn_1000000", Replace, 1, 1_000_000, 512, 64 * KIB),
    ("threads1_streams1", Replace, 1, 1, MIB, MIB),
    ("threads2_streams2", Replace, 2, 1, MIB, MIB),
    ("threads4_streams4", Replace, 4, 1, MIB, MIB),
    ("threads1_churn", Replace, 1, 100, 512, MIB),
    ("threads2_churn", Replace, 2, 100, 512, MIB),
    ("threads4_churn", Replace, 4, 100, 512, MIB),
    ("handover", Handed, 2, handover::RING, 512, MIB),
    ("raw_hot", Pointers, 1, 1, MIB, MIB),
    ("raw_churn_10000", Pointers, 1, 10_000, 512, 64 * MIB),
    ("raw_parallel", Pointers, 2, 1, MIB, MIB),
    ("raw_parallel_8", Pointers, 8, 1, MIB, MIB),
];

pub(crate) fn all() -> Vec<Benchmark> {
    let benchmark = |(name, kind, threads, live, least, most)| {
        Benchmark::new(name, move |bench| measure(bench, kind, threads, live, Sizes::between(least, most)))
    };
    ALL.map(benchmark).into()
}

fn measure(bench: &Bench, kind: Kind, threads: u32, live: u32, meant: Sizes) -> Result<Vec<Row>, Failure> {
    let Bench { session, config, args } = bench;
    let room = open(session)?.memory_info()?.free / u64::from(threads);
    let sizes = meant.within(room / 4, live);
    if sizes.most() < meant.most() {
        let (most, meant) = (Bytes(sizes.most()), Bytes(meant.most()));
        session.message(format_args!("note: the device has room for blocks of at most {most} instead of {meant}"));
    }
    // Rounds of several threads are longer, and one thread alone runs each round, too.
    let rounds = if threads > 1 { ROUNDS / 3 } else { ROUNDS };
    let rounds = if args.quick { rounds / 8 } else { rounds };
    let seeds = session.seed()..session.seed() + u64::from(threads);
    let mut scripts: Vec<Replacements> = seeds.map(|seed| Replacements::new(seed, sizes, live)).collect();
    let mut contest = Contest { pairs: if threads > 1 { 5_000 } else { 3_000 }, live, rounds, scripts: &mut scripts };
    let bytes = sizes.mean().saturating_mul(live.into());
    let yardstick = || Yardstick::new(bytes, live);
    let aquifer = || Aquifer::open(session, &open(session)?, config, 1);
    let ([ours, theirs], beside) = match kind {
        Replace => {
            let yardsticks = (0..threads).map(|_| yardstick()).collect();
            let ours = Entrant::replacers(on_streams(aquifer()?, threads)?, aquifer, contest.scripts)?;
            let theirs = Entrant::replacers(yardsticks, || Ok(yardstick()), contest.scripts)?;
            (contest.run(ours, theirs)?, "offset-allocator")
        }
        Pointers => {
            let raws = on_streams(aquifer()?, threads)?.into_iter().map(Raw).collect();
            let ours = Entrant::replacers(raws, || aquifer().map(Raw), contest.scripts)?;
            let theirs = Entrant::replacers(on_streams(aquifer()?, threads)?, aquifer, contest.scripts)?;
            (contest.run(ours, theirs)?, "aquifer-handles")
        }
        Handed => {
            let first = aquifer()?;
            let second = first.on_new_stream()?;
            let ours = Entrant::new(HandOver::between(first, second), Some(HandOver::alone(aquifer()?)));
            let shared = || Shared::new(yardstick());
            let both = shared();
            let theirs = HandOver::between(both.clone(), both);
            let theirs = Entrant::new(theirs, Some(HandOver::alone(shared())));
            (contest.run(ours, theirs)?, "offset-allocator")
        }
    };
    let row = Row::new().with("threads", threads).with("live", live).with("largest_bytes", sizes.most());
    let row = row.with("ns_per_pair", ours.0).with("rate_vs_one_thread", ours.1).with("yardstick", beside);
    let row = row.with("yardstick_ns_per_pair", theirs.0).with("yardstick_rate_vs_one_thread", theirs.1);
    Ok(vec![row.with("over_yardstick", ours.0 / theirs.0)])
}

/// Handles of one allocator, each but the first with a new stream.
fn on_streams(first: Aquifer, count: u32) -> Result<Vec<Aquifer>, Failure> {
    let mut all = vec![first];
    for _ in 1..count {
        let other = all[0].on_new_stream()?;
        all.push(other);
    }
    Ok(all)
}

/// A team, and one thread alone that does the same.
struct Entrant<T> {
    team: T,
    times: Times,
    alone: Option<(T, Times)>,
}

impl<S: Subject + Send> Entrant<Replacers<S>>
where
    S::Handle: Send,
{
    /// Threads that replace blocks, and one alone if there are several.
    fn replacers(
        subjects: Vec<S>,
        alone: impl FnOnce() -> Result<S, Failure>,
        rounds: &[Replacements],
    ) -> Result<Self, Failure> {
        let alone = if subjects.len() > 1 { Some(Replacers::new(vec![alone()?], &rounds[..1])?) } else { None };
        Ok(Entrant::new(Replacers::new(subjects, rounds)?, alone))
    }
}

impl<T: Team> Entrant<T> {
    fn new(team: T, alone: Option<T>) -> Entrant<T> {
        Entrant { team, times: Times::default(), alone: alone.map(|alone| (alone, Times::default())) }
    }

    fn round(&mut self, scripts: &[Replacements], pairs: u32, measured: bool) -> Result<(), Failure> {
        let elapsed = self.team.round(scripts)?;
        let alone = self.alone.as_mut().map(|(team, _)| team.round(&scripts[..1])).transpose()?;
        if measured {
            self.times.add(elapsed, pairs.into());
            if let (Some((_, times)), Some(elapsed)) = (&mut self.alone, alone) {
                times.add(elapsed, pairs.into());
            }
        }
        Ok(())
    }

    /// Nanoseconds of a pair in one thread, and the pairs per time of each thread over those of one
    /// alone. Frees everything.
    fn finish(self) -> (f64, f64) {
        let ns_per_pair = self.times.median();
        let alone = self.alone.map(|(team, times)| {
            team.leave();
            times.median()
        });
        self.team.leave();
        (ns_per_pair, alone.unwrap_or(ns_per_pair) / ns_per_pair)
    }
}

/// Rounds that both sides run.
struct Contest<'a> {
    /// Of each thread in a round.
    pairs: u32,
    live: u32,
    rounds: usize,
    scripts: &'a mut [Replacements],
}

impl Contest<'_> {
    fn run(
        &mut self,
        mut ours: Entrant<impl Team>,
        mut theirs: Entrant<impl Team>,
    ) -> Result<[(f64, f64); 2], Failure> {
        // First about as many blocks are replaced as there are, so that the memory is fragmented as
        // in the long run.
        for round in 0..=self.rounds {
            let pairs = if round == 0 { self.pairs.max(self.live) } else { self.pairs };
            self.scripts.iter_mut().for_each(|script| script.draw(pairs));
            ours.round(self.scripts, pairs, round > 0)?;
            theirs.round(self.scripts, pairs, round > 0)?;
        }
        Ok([ours.finish(), theirs.finish()])
    }
}

/// The session's device; a simulated one has at least [`SIMULATED_BYTES`].
pub(crate) fn open(session: &Session) -> Result<Device, Failure> {
    match session.sim() {
        Some(sim) => session.open_with_capacity(sim.capacity_bytes.max(SIMULATED_BYTES)),
        None => session.open(),
    }
}

/// This project's allocator through its raw interface: blocks are bare pointers.
#[derive(Debug)]
struct Raw(Aquifer);

impl Subject for Raw {
    type Handle = DevicePtr;

    #[inline(always)]
    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<DevicePtr, Refused> {
        Ok(self.0.allocator().alloc_raw(bytes, self.0.stream(stream))?)
    }

    #[inline]
    fn free(&mut self, handle: DevicePtr) {
        if let Err(error) = self.0.allocator().free_raw(handle) {
            panic!("a live pointer was refused: {error}");
        }
    }
}
