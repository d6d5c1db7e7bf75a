//! The ring against a model: any order of tasks, failures, cancellations and losses.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use aquifer_device::{Code, DeviceError, Operation};
use proptest::prelude::*;

use super::*;

const SIZES: Sizes = Sizes { chunk_bytes: 4 * PAGE, chunks: 3, threads: 2 };
const SEVEN: Sizes = Sizes { chunks: 7, threads: 4, ..SIZES };

type TestTask = Task<u32, u64>;

fn order(job: u32, way: Way, bytes: u64) -> Submission<u32> {
    Submission { work: job, way, bytes, phase: 0, stream: job, priority: 0 }
}

fn lost() -> TransferError {
    TransferError::Device(DeviceError::new(Operation::SynchronizeEvent, Code(214)))
}

/// A job in the model.
#[derive(Debug)]
struct Known {
    way: Way,
    bytes: u64,
    priority: i32,
    begun: u64,
    /// Complete pieces: sent for uploads, stored for downloads.
    through: Vec<Range<u64>>,
    in_use: usize,
    /// Pieces that others began since this job last began one, although it could begin more and
    /// held less than its share.
    passed: BTreeMap<u32, usize>,
    ended: Option<Result<(), TransferError>>,
    failed: bool,
}

/// A ring, its tasks under way, and the expected state of its jobs.
#[derive(Default)]
struct Model {
    ring: Option<Ring<u32, u64>>,
    out: Vec<TestTask>,
    jobs: BTreeMap<u32, Known>,
    made: u64,
    /// Chunks given up by the ring.
    surplus: BTreeSet<u64>,
    lost: bool,
}

impl Model {
    fn ring(&mut self) -> &mut Ring<u32, u64> {
        self.ring.get_or_insert_with(|| Ring::new(SIZES))
    }

    fn submit(&mut self, way: Way, bytes: u64, phase: u64, stream: u32, priority: i32) {
        let job = u32::try_from(self.jobs.len()).unwrap();
        let submitted = self.ring().submit(Submission { work: job, way, bytes, phase, stream, priority });
        assert_eq!(submitted.is_err(), self.lost);
        let known = Known {
            way,
            bytes,
            priority,
            begun: 0,
            through: Vec::new(),
            in_use: 0,
            passed: BTreeMap::new(),
            ended: submitted.err().map(Err),
            failed: self.lost,
        };
        self.jobs.insert(job, known);
    }

    fn take(&mut self) -> bool {
        let had = self.ring().has_task();
        let waiting = self.waiting();
        let Some(task) = self.ring().next() else {
            assert!(!had);
            return false;
        };
        assert!(had);
        match &task {
            Task::Fill(piece) | Task::Fetch(piece) => self.begun(piece.work, piece.range.clone(), &waiting),
            Task::Store(piece) => self.known(piece.work).in_use += 1,
            Task::Wait(flight) => {
                let stream = flight.stream;
                let same = |task: &TestTask| matches!(task, Task::Wait(other) if other.stream == stream);
                assert!(!self.out.iter().any(same), "two tasks wait for one stream");
            }
            Task::Grow { .. } => {}
        }
        self.out.push(task);
        self.check();
        true
    }

    /// Jobs that can begin more and, with their streams, hold less than their share.
    fn waiting(&mut self) -> Vec<u32> {
        let ring = self.ring();
        let entries = ring.queued.iter().map(|id| &ring.jobs[id]);
        entries.filter(|entry| ring.may_hold_more(entry)).map(|entry| entry.order.work).collect()
    }

    fn begun(&mut self, job: u32, range: Range<u64>, waiting: &[u32]) {
        assert!(waiting.contains(&job), "more than its share");
        let priority = self.known(job).priority;
        for &other in waiting.iter().filter(|&&other| other != job) {
            assert!(self.known(other).priority >= priority, "job {job} passed job {other}, which is more urgent");
            if self.known(other).priority > priority {
                continue;
            }
            let passed = self.known(other).passed.entry(job).or_default();
            *passed += 1;
            assert!(*passed <= 1, "job {other} was passed twice by {job}");
        }
        let waits_not: Vec<u32> = self.jobs.keys().copied().filter(|other| !waiting.contains(other)).collect();
        waits_not.iter().for_each(|&other| self.known(other).passed.clear());
        let known = self.known(job);
        known.passed.clear();
        assert_eq!(known.begun, range.start);
        assert!(range.end <= known.bytes && !range.is_empty() && known.ended.is_none());
        known.begun = range.end;
        known.in_use += 1;
    }

    fn known(&mut self, job: u32) -> &mut Known {
        self.jobs.get_mut(&job).unwrap()
    }

    /// Gives the task at `index` back, done or failed.
    fn give(&mut self, index: usize, error: Option<TransferError>) {
        let task = self.out.remove(index);
        self.lost |= error.as_ref().is_some_and(TransferError::is_device_lost);
        let done = match (task, error) {
            (Task::Grow { .. }, Some(error)) => TaskResult::Grown(Err(error)),
            (Task::Grow { .. }, None) => {
                self.made += 1;
                TaskResult::Grown(Ok(self.made))
            }
            (Task::Wait(flight), None) => TaskResult::Waited(flight, Ok(())),
            (Task::Wait(flight), Some(error)) => {
                let job = u32::try_from(flight.id).unwrap();
                self.known(job).failed |= flight.way == Way::Down;
                TaskResult::Waited(flight, Err(error))
            }
            (Task::Fill(piece) | Task::Fetch(piece) | Task::Store(piece), Some(error)) => {
                let known = self.known(piece.work);
                known.in_use -= 1;
                known.failed = true;
                TaskResult::Failed(piece, error)
            }
            (Task::Fill(piece) | Task::Fetch(piece), None) => {
                let (range, known) = (piece.range.clone(), self.known(piece.work));
                known.in_use -= 1;
                if known.way == Way::Up {
                    known.through.push(range);
                }
                TaskResult::Sent(piece)
            }
            (Task::Store(piece), None) => {
                let (range, known) = (piece.range.clone(), self.known(piece.work));
                known.in_use -= 1;
                known.through.push(range);
                TaskResult::Stored(piece)
            }
        };
        let after = self.ring().complete(done);
        self.surplus.extend(after.surplus);
        for (job, result) in after.ended {
            self.ended(job, result);
        }
        self.check();
    }

    fn ended(&mut self, job: u32, result: Result<(), TransferError>) {
        let lost = self.lost;
        let no_memory = self.ring().chunks == 0;
        let known = self.known(job);
        assert!(known.ended.is_none() && known.in_use == 0, "job {job} ended twice or while a task had it");
        assert_eq!(result.is_err(), known.failed || (result.is_err() && (lost || no_memory)), "job {job}: {result:?}");
        if result.is_ok() {
            known.through.sort_by_key(|range| range.start);
            let mut at = 0;
            for range in &known.through {
                assert_eq!(range.start, at, "bytes of job {job} twice or not at all");
                at = range.end;
            }
            assert_eq!(at, known.bytes);
        }
        known.ended = Some(result);
    }

    /// Asserts that every chunk is in one place, and that the chunks of each stream are counted.
    fn check(&mut self) {
        self.check_windows();
        let mut places: Vec<u64> = self.surplus.iter().copied().collect();
        for task in &self.out {
            match task {
                Task::Fill(piece) | Task::Fetch(piece) | Task::Store(piece) => places.push(piece.chunk),
                Task::Wait(flight) => places.push(flight.chunk),
                Task::Grow { .. } => {}
            }
        }
        let growing = self.out.iter().filter(|task| matches!(task, Task::Grow { .. })).count();
        let (made, given_up) = (self.made, self.surplus.len());
        let ring = self.ring();
        places.extend(ring.free.iter().chain(ring.flying.iter().chain(&ring.arrived).map(|flight| &flight.chunk)));
        places.sort_unstable();
        assert_eq!(places, (1..=made).collect::<Vec<_>>());
        assert_eq!(ring.chunks, usize::try_from(made).unwrap() - given_up);
        assert_eq!(ring.growing, growing);
        assert!(ring.chunks + growing <= SIZES.chunks);
    }

    fn check_windows(&mut self) {
        let mut held: BTreeMap<u32, usize> = BTreeMap::new();
        let mut holds = |stream| *held.entry(stream).or_default() += 1;
        self.ring();
        let ring = self.ring.as_ref().unwrap();
        for task in &self.out {
            match task {
                Task::Fill(piece) | Task::Fetch(piece) | Task::Store(piece) => holds(ring.jobs[&piece.id].order.stream),
                Task::Wait(flight) => holds(flight.stream),
                Task::Grow { .. } => {}
            }
        }
        ring.flying.iter().chain(&ring.arrived).for_each(|flight| holds(flight.stream));
        assert_eq!(ring.windows.held(), held);
        assert!(held.values().all(|&held| held < SIZES.chunks), "one stream has all chunks");
    }

    /// Performs all tasks without failures. Asserts that all jobs end.
    fn drain(&mut self) {
        let mut steps = 0;
        while self.take() || !self.out.is_empty() {
            if !self.out.is_empty() {
                self.give(0, None);
            }
            steps += 1;
            assert!(steps < 100_000, "the ring goes on for ever");
        }
        assert!(self.ring().is_idle(), "{:?}", self.jobs);
        assert!(self.jobs.values().all(|known| known.ended.is_some()));
    }
}

#[derive(Clone, Debug)]
enum Step {
    Submit { up: bool, bytes: u64, phase: u64, stream: u32, priority: i32 },
    Take,
    Give(prop::sample::Index),
    Fail(prop::sample::Index),
    Lose(prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = prop_oneof![1..100u64, Just(4 * PAGE as u64), 1..40 * PAGE as u64];
    let submit = (any::<bool>(), bytes, 0..PAGE as u64, 0..3u32, 0..2i32)
        .prop_map(|(up, bytes, phase, stream, priority)| Step::Submit { up, bytes, phase, stream, priority });
    let step = prop_oneof![
        2 => submit,
        12 => Just(Step::Take),
        12 => any::<prop::sample::Index>().prop_map(Step::Give),
        2 => any::<prop::sample::Index>().prop_map(Step::Fail),
    ];
    let lose = prop::option::weighted(0.2, any::<prop::sample::Index>());
    (prop::collection::vec(step, 1..150), lose).prop_map(|(mut steps, lose)| {
        if let Some(index) = lose {
            let at = index.index(steps.len());
            steps.insert(at, Step::Lose(index));
        }
        steps
    })
}

proptest! {
    #[test]
    fn every_byte_is_copied_once_and_no_chunk_is_lost(steps in steps()) {
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Submit { up, bytes, phase, stream, priority } => {
                    model.submit(if up { Way::Up } else { Way::Down }, bytes, phase, stream, priority);
                }
                Step::Take => drop(model.take()),
                Step::Give(index) if !model.out.is_empty() => model.give(index.index(model.out.len()), None),
                Step::Fail(index) if !model.out.is_empty() => {
                    model.give(index.index(model.out.len()), Some(TransferError::Cancelled));
                }
                Step::Lose(index) if !model.out.is_empty() => {
                    let index = index.index(model.out.len());
                    model.give(index, Some(lost()));
                }
                _ => {}
            }
        }
        model.drain();
    }
}

/// Performs tasks in order until there are none, and returns the jobs of the pieces begun.
fn begun(ring: &mut Ring<u32, u64>) -> Vec<u32> {
    let (mut begun, mut made) = (Vec::new(), 0);
    while let Some(task) = ring.next() {
        let done = match task {
            Task::Grow { .. } => {
                made += 1;
                TaskResult::Grown(Ok(made))
            }
            Task::Fill(piece) | Task::Fetch(piece) => {
                begun.push(piece.work);
                TaskResult::Sent(piece)
            }
            Task::Store(piece) => TaskResult::Stored(piece),
            Task::Wait(flight) => TaskResult::Waited(flight, Ok(())),
        };
        ring.complete(done);
    }
    begun
}

#[test]
fn a_small_job_is_not_stuck_behind_a_large_one() {
    let mut ring = Ring::new(SIZES);
    ring.submit(order(0, Way::Up, 1000 * PAGE as u64)).unwrap();
    ring.submit(order(1, Way::Down, 1)).unwrap();
    ring.submit(order(2, Way::Up, 5 * PAGE as u64)).unwrap();
    let begun = begun(&mut ring);
    assert_eq!(begun[..5], [0, 1, 2, 0, 2]);
    assert_eq!(begun.len(), 250 + 1 + 2);
}

#[test]
fn pieces_end_at_page_boundaries_of_the_source() {
    let mut ring: Ring<u32, u64> = Ring::new(SIZES);
    ring.submit(Submission { phase: 100, ..order(0, Way::Up, 30_000) }).unwrap();
    for chunk in 0..2 {
        let Some(Task::Grow { bytes, .. }) = ring.next() else { panic!("a chunk is to be had first") };
        assert_eq!(bytes, 16_384);
        ring.complete(TaskResult::Grown(Ok(chunk)));
        let Some(Task::Fill(piece)) = ring.next() else { panic!("a piece is to be begun") };
        assert_eq!(piece.range, [0..16_284, 16_284..30_000][usize::try_from(chunk).unwrap()]);
    }
}

#[test]
fn with_little_memory_there_are_fewer_chunks_then_smaller_ones_then_an_error() {
    let short = || TransferError::OutOfPinned {
        requested: 0,
        reserved: 0,
        free: 0,
        largest: 0,
        copying: 0,
        limit: None,
        source: None,
    };
    let mut ring: Ring<u32, u64> = Ring::new(Sizes { chunk_bytes: 256 << 10, ..SIZES });
    ring.submit(order(0, Way::Up, 1 << 30)).unwrap();
    for bytes in [256 << 10, 128 << 10, 64 << 10] {
        assert!(matches!(ring.next(), Some(Task::Grow { bytes: asked, .. }) if asked == bytes));
        assert!(ring.next().is_some_and(|task| matches!(task, Task::Grow { .. })), "others try meanwhile");
        assert!(ring.complete(TaskResult::Grown(Err(short()))).is_empty());
        let after = ring.complete(TaskResult::Grown(Err(short())));
        assert_eq!(after.ended.len(), usize::from(bytes == 64 << 10));
    }
    assert!(ring.is_idle());

    // The next job tries again, and uses the chunks that there are.
    ring.submit(order(1, Way::Up, 1 << 30)).unwrap();
    assert!(matches!(ring.next(), Some(Task::Grow { bytes, .. }) if bytes == 256 << 10));
    ring.complete(TaskResult::Grown(Ok(7)));
    assert!(matches!(ring.next(), Some(Task::Fill(_))));
    assert!(matches!(ring.next(), Some(Task::Grow { .. })));
    ring.complete(TaskResult::Grown(Err(short())));
    assert!(ring.next().is_none(), "one chunk is all there is");
}

#[test]
fn a_cancelled_download_releases_its_arrived_chunks() {
    let mut ring: Ring<u32, u64> = Ring::new(SIZES);
    ring.submit(order(0, Way::Down, 1 << 20)).unwrap();
    for chunk in 0..2 {
        assert!(matches!(ring.next(), Some(Task::Grow { .. })));
        ring.complete(TaskResult::Grown(Ok(chunk)));
        let Some(Task::Fetch(piece)) = ring.next() else { panic!("a piece is to be begun") };
        ring.complete(TaskResult::Sent(piece));
    }
    for _ in 0..2 {
        let Some(Task::Wait(flight)) = ring.next() else { panic!("only waiting is left") };
        assert!(ring.next().is_none(), "one task waits for a stream");
        ring.complete(TaskResult::Waited(flight, Ok(())));
        if ring.arrived.len() == 1 && ring.flying.len() == 1 {
            let Some(Task::Store(piece)) = ring.next() else { panic!("the arrived piece is to be stored") };
            let after = ring.complete(TaskResult::Failed(piece, TransferError::Cancelled));
            assert!(matches!(after.ended[..], [(0, Err(TransferError::Cancelled))]));
            break;
        }
    }
    assert!(ring.is_idle() && ring.next().is_none(), "no task waits for an unneeded copy");
    ring.submit(order(1, Way::Down, 1)).unwrap();
    assert!(matches!(ring.next(), Some(Task::Fetch(_))));
}

/// Performs tasks until only waits for these streams are left, and returns the jobs of pieces
/// begun. The waits do not end.
fn begun_but_for(ring: &mut Ring<u32, u64>, still: &[u32], most: usize) -> Vec<u32> {
    let (mut begun, mut made) = (Vec::new(), 100);
    while begun.len() < most {
        let done = match ring.next() {
            None => break,
            Some(Task::Grow { .. }) => {
                made += 1;
                TaskResult::Grown(Ok(made))
            }
            Some(Task::Fill(piece) | Task::Fetch(piece)) => {
                begun.push(piece.work);
                TaskResult::Sent(piece)
            }
            Some(Task::Store(piece)) => TaskResult::Stored(piece),
            Some(Task::Wait(flight)) if still.contains(&flight.stream) => continue,
            Some(Task::Wait(flight)) => TaskResult::Waited(flight, Ok(())),
        };
        ring.complete(done);
    }
    begun
}

/// Some streams stand still from the beginning, others later.
#[test]
fn a_stream_that_stands_still_leaves_chunks_to_others() {
    let large = 1000 * PAGE as u64;
    for (way, still, before) in
        [(Way::Up, 1, 0), (Way::Down, 1, 0), (Way::Up, 3, 0), (Way::Up, 1, 40), (Way::Down, 1, 40)]
    {
        let mut ring = Ring::new(SEVEN);
        let streams: Vec<u32> = (0..still).collect();
        streams.iter().for_each(|&stream| ring.submit(order(stream, way, large)).unwrap());
        begun_but_for(&mut ring, &[], before);
        let stuck = begun_but_for(&mut ring, &streams, usize::MAX);
        assert!(stuck.len() <= 6, "{stuck:?}");
        ring.submit(order(9, way, 40 * PAGE as u64)).unwrap();
        let begun = begun_but_for(&mut ring, &streams, usize::MAX);
        assert_eq!(begun.iter().filter(|&&job| job == 9).count(), 10, "{way:?}, {still} still after {before}");
        assert!(ring.jobs.values().all(|entry| entry.order.work != 9), "it has ended");
    }
}

/// An urgent job passes any number of others, and gets their chunks as they come back. The others
/// go on with the rest.
#[test]
fn an_urgent_job_goes_first() {
    let mut ring = Ring::new(SEVEN);
    let large = 1000 * PAGE as u64;
    for job in 0..5 {
        ring.submit(Submission { priority: 1, ..order(job, Way::Up, large) }).unwrap();
    }
    begun_but_for(&mut ring, &[], 40);
    ring.submit(order(9, Way::Up, 80 * PAGE as u64)).unwrap();
    let begun = begun_but_for(&mut ring, &[], 40);
    let until = begun.iter().rposition(|&job| job == 9).unwrap();
    let others = begun[..until].iter().filter(|&&job| job != 9).count();
    assert_eq!(begun.iter().filter(|&&job| job == 9).count(), 20);
    // With one priority they would have five times as many. They have the chunks that its stream
    // may not hold yet, and the last chunk.
    assert!(others <= 10, "{others} pieces of others before the end of the urgent one: {begun:?}");
    assert!((0..5).all(|job| begun.contains(&job)), "{begun:?}");
}
