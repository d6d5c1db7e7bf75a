//! A deterministic executor: it runs threads one at a time, in an order that a seed fixes.
//!
//! Whole-system simulation runs the threads of a program under it, so that a failure is a seed. A
//! thread of an executor runs until it ends, calls [`yield_now`], or has to wait: for a lock or a
//! condition variable of [`crate::fork`], which all crates of this library use. Then the executor
//! chooses the next one. Threads that it starts with [`spawn`] take part, too.
//!
//! Invariant: of an executor's threads one runs at a time. So whether a lock is taken when a thread
//! comes to it depends on the seed alone. Code that waits in another way must not wait for a thread
//! of the executor.
//!
//! Other threads come here only where they would wait, and find that they are in no executor.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// How many executors there are. While there are none, no thread looks for its own.
static EXECUTORS: AtomicUsize = AtomicUsize::new(0);

/// A thread that yields goes on in all but one of so many cases, since most yields are no place
/// where an interleaving matters.
const GOES_ON: u64 = 4;

/// Threads that all wait, some of them for a lock, are tried again so often, a millisecond apart.
const VAIN_MAX: usize = 200;

/// A thread that keeps its turn for so long loops for ever.
const TURN_MAX: Duration = Duration::from_secs(60);

/// The work of a thread.
pub type Body = Box<dyn FnOnce() + Send>;

/// The result of a run that did not end well.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// These threads wait for each other: their names, each with what it waits for.
    #[error("threads wait for each other: {}", .0.join("; "))]
    Stuck(Vec<String>),
    /// The threads did not end within so many turns.
    #[error("the threads do not end: {0} turns were taken")]
    Endless(u64),
    /// The thread with this name keeps its turn: it calls and waits for nothing, and does not end.
    #[error("{0} keeps its turn: it calls and waits for nothing")]
    Keeps(String),
    /// A thread panicked, with this message.
    #[error("{0}")]
    Panicked(String),
}

/// What a thread does while another one runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    /// It can go on.
    Ready,
    /// It waits for a lock, which it found taken at this moment ([`State::moment`]).
    Lock(u64),
    /// It waits for a notification of the condition variable at this address; `timed` if it also
    /// goes on when no thread can.
    Condition { at: usize, timed: bool },
    /// It ended.
    Done,
}

#[derive(Debug)]
struct Member {
    name: String,
    status: Status,
    /// Notified when its turn comes.
    turn: Arc<Condvar>,
    /// True if it goes on because no thread could.
    timed_out: bool,
}

#[derive(Debug)]
struct State {
    random: u64,
    members: Vec<Member>,
    /// The member that runs.
    running: Option<usize>,
    turns: u64,
    turns_max: u64,
    /// Counts the turns that may have changed anything: all but vain attempts to take a lock.
    moment: u64,
    /// Vain attempts since the last other turn, after which all others waited, too.
    vain: usize,
    failure: Option<Failure>,
}

#[derive(Debug)]
struct Executor {
    state: Mutex<State>,
    /// Notified when the run is over.
    over: Condvar,
}

thread_local! {
    /// The executor of this thread, and its number there.
    static OWN: RefCell<Option<(Arc<Executor>, usize)>> = const { RefCell::new(None) };
    /// Passes the turn on when the thread has ended. It is created first on the thread, and so
    /// dropped after the thread's other values.
    static END: RefCell<Option<End>> = const { RefCell::new(None) };
}

struct End(Arc<Executor>, usize);

impl Drop for End {
    fn drop(&mut self) {
        let End(executor, number) = self;
        let mut state = executor.state.lock();
        state.members[*number].status = Status::Done;
        state.moment += 1;
        executor.next(&mut state);
    }
}

/// Runs threads until all of them have ended. The order in which they run depends on the seed and
/// on nothing else. Returns the number of turns that they took.
///
/// # Errors
/// When a thread panics, when all threads wait, when they take more than `turns_max` turns, or when
/// one keeps its turn for a minute. In all but the first case the threads stay where they are for
/// ever.
pub fn run(seed: u64, turns_max: u64, threads: Vec<Body>) -> Result<u64, Failure> {
    run_with(seed, (turns_max, TURN_MAX), threads)
}

fn run_with(seed: u64, (turns_max, turn_max): (u64, Duration), threads: Vec<Body>) -> Result<u64, Failure> {
    let state = State {
        random: seed,
        members: Vec::new(),
        running: None,
        turns: 0,
        turns_max,
        moment: 0,
        vain: 0,
        failure: None,
    };
    let executor = Arc::new(Executor { state: Mutex::new(state), over: Condvar::new() });
    EXECUTORS.fetch_add(1, Ordering::Relaxed);
    let handles: Result<Vec<_>, io::Error> =
        threads.into_iter().map(|body| executor.start(Builder::new(), body)).collect();
    let handles = handles.map_err(|error| Failure::Panicked(format!("a thread could not be started: {error}")))?;
    let mut state = executor.state.lock();
    executor.next(&mut state);
    while state.failure.is_none() && state.members.iter().any(|member| member.status != Status::Done) {
        let turns = state.turns;
        let is_late = executor.over.wait_for(&mut state, turn_max).timed_out();
        if is_late && state.turns == turns {
            let running = state.running.map_or_else(String::new, |running| state.members[running].name.clone());
            state.failure.get_or_insert(Failure::Keeps(running));
        }
    }
    let (failure, turns) = (state.failure.take(), state.turns);
    let all_end = state.members.iter().all(|member| member.status == Status::Done);
    drop(state);
    EXECUTORS.fetch_sub(1, Ordering::Relaxed);
    if all_end {
        handles.into_iter().for_each(|handle| drop(handle.join()));
    }
    failure.map_or(Ok(turns), Err)
}

/// Starts a thread. It takes part in the executor of the calling thread, if that has one.
///
/// # Errors
/// As [`Builder::spawn`].
pub fn spawn(builder: Builder, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    match own() {
        Some((executor, _)) => executor.start(builder, Box::new(body)),
        None => builder.spawn(body),
    }
}

/// Lets another thread of the executor run. Does nothing on a thread that is in none.
pub fn yield_now() {
    if let Some((executor, number)) = own() {
        executor.pass(number, Status::Ready);
    }
}

/// Lets other threads run for about this long, or one turn in an executor.
pub fn pause(time: Duration) {
    match own() {
        Some((executor, number)) => drop(executor.pass(number, Status::Ready)),
        None if time.is_zero() => std::thread::yield_now(),
        None => std::thread::sleep(time),
    }
}

/// Lets other threads run until `take` returns something, which it does once a lock is free.
/// Returns `None` on a thread that is in no executor.
pub fn wait_until<T>(mut take: impl FnMut() -> Option<T>) -> Option<T> {
    let (executor, number) = own()?;
    let mut found_at = None;
    loop {
        if let Some(taken) = take() {
            executor.state.lock().members[number].status = Status::Ready;
            return Some(taken);
        }
        let moment = executor.state.lock().moment + u64::from(found_at.is_none());
        found_at = Some(moment);
        executor.pass(number, Status::Lock(moment));
    }
}

/// Lets other threads run until the condition variable at this address is notified or, if `timed`,
/// no thread can go on; returns true in the latter case. Returns `None` on a thread that is in no
/// executor.
pub(crate) fn wait_notified(at: usize, timed: bool) -> Option<bool> {
    let (executor, number) = own()?;
    Some(executor.pass(number, Status::Condition { at, timed }))
}

/// True if the calling thread is in an executor.
pub(crate) fn is_own() -> bool {
    EXECUTORS.load(Ordering::Relaxed) > 0 && OWN.try_with(|own| own.borrow().is_some()).unwrap_or(false)
}

/// Notifies one thread or all threads that wait for the condition variable at this address.
pub(crate) fn notify(at: usize, all: bool) {
    let Some((executor, _)) = own() else { return };
    let mut state = executor.state.lock();
    let waits = |member: &&mut Member| matches!(member.status, Status::Condition { at: theirs, .. } if theirs == at);
    let waiting = state.members.iter_mut().filter(waits);
    waiting.take(if all { usize::MAX } else { 1 }).for_each(|member| member.status = Status::Ready);
}

fn own() -> Option<(Arc<Executor>, usize)> {
    if EXECUTORS.load(Ordering::Relaxed) == 0 {
        return None;
    }
    OWN.try_with(|own| own.borrow().clone()).ok().flatten()
}

impl Executor {
    /// Starts a thread, which waits for its turn.
    fn start(self: &Arc<Self>, builder: Builder, body: Body) -> io::Result<JoinHandle<()>> {
        let mut state = self.state.lock();
        let number = state.members.len();
        let name = format!("thread {number}");
        state.members.push(Member { name, status: Status::Ready, turn: Arc::default(), timed_out: false });
        drop(state);
        let executor = self.clone();
        let started = builder.spawn(move || {
            END.with(|end| *end.borrow_mut() = Some(End(executor.clone(), number)));
            OWN.with(|own| *own.borrow_mut() = Some((executor.clone(), number)));
            executor.wait_for_turn(&mut executor.state.lock(), number);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(body)) {
                let failure = Failure::Panicked(format!("thread {number}: {}", message_of(&*panic)));
                executor.state.lock().failure.get_or_insert(failure);
            }
        });
        if started.is_err() {
            self.state.lock().members[number].status = Status::Done;
        }
        started
    }

    /// Passes the turn on and waits until it comes back. Returns true if that is only because no
    /// other thread could go on.
    fn pass(&self, number: usize, status: Status) -> bool {
        let mut state = self.state.lock();
        if status == Status::Ready && !state.below(GOES_ON).is_multiple_of(GOES_ON) {
            return false;
        }
        let is_vain = matches!((state.members[number].status, status), (Status::Lock(_), Status::Lock(_)));
        state.moment += u64::from(!is_vain);
        state.vain = if is_vain { state.vain } else { 0 };
        state.members[number].status = status;
        self.next(&mut state);
        self.wait_for_turn(&mut state, number);
        std::mem::take(&mut state.members[number].timed_out)
    }

    fn wait_for_turn(&self, state: &mut parking_lot::MutexGuard<'_, State>, number: usize) {
        let turn = state.members[number].turn.clone();
        while state.running != Some(number) {
            turn.wait(state);
        }
        // A vain attempt to take a lock is recognised by the status that is left here.
        if !matches!(state.members[number].status, Status::Lock(_)) {
            state.members[number].status = Status::Ready;
        }
    }

    /// Chooses the member that runs next.
    fn next(&self, state: &mut State) {
        state.turns += 1;
        state.running = None;
        if state.turns > state.turns_max {
            state.failure.get_or_insert(Failure::Endless(state.turns_max));
        }
        if state.failure.as_ref().is_some_and(|failure| !matches!(failure, Failure::Panicked(_))) {
            self.over.notify_all();
            return;
        }
        let moment = state.moment;
        let can_go_on = |status| matches!(status, Status::Ready) || matches!(status, Status::Lock(at) if at < moment);
        let chosen = state.choose(can_go_on).or_else(|| {
            let chosen = state.choose(|status| matches!(status, Status::Condition { timed: true, .. }))?;
            state.members[chosen].timed_out = true;
            Some(chosen)
        });
        let chosen = chosen.or_else(|| state.wait_for_others());
        match chosen {
            Some(chosen) => {
                state.running = Some(chosen);
                state.members[chosen].turn.notify_one();
            }
            None => {
                let waiting = state.members.iter().filter(|member| member.status != Status::Done);
                let waiting: Vec<String> =
                    waiting.map(|member| format!("{} waits for {}", member.name, member.status)).collect();
                if !waiting.is_empty() {
                    state.failure.get_or_insert(Failure::Stuck(waiting));
                }
                self.over.notify_all();
            }
        }
    }
}

impl State {
    /// A member that waits for a lock, after a moment: the lock may be one of the whole process, which
    /// a thread outside of the executor holds. `None` after [`VAIN_MAX`] such moments.
    fn wait_for_others(&mut self) -> Option<usize> {
        let waiting = |number: &usize| matches!(self.members[*number].status, Status::Lock(_));
        let waiting: Vec<usize> = (0..self.members.len()).filter(waiting).collect();
        if self.vain == VAIN_MAX || waiting.is_empty() {
            return None;
        }
        (self.vain, self.turns) = (self.vain + 1, self.turns - 1);
        std::thread::sleep(Duration::from_millis(1));
        Some(waiting[self.vain % waiting.len()])
    }

    /// A member whose status is of a kind.
    fn choose(&mut self, is_one: impl Fn(Status) -> bool) -> Option<usize> {
        let count = self.members.iter().filter(|member| is_one(member.status)).count() as u64;
        if count == 0 {
            return None;
        }
        let nth = usize::try_from(self.below(count)).unwrap_or(0);
        (0..self.members.len()).filter(|&number| is_one(self.members[number].status)).nth(nth)
    }

    /// A random number below `end`, by the generator SplitMix64.
    fn below(&mut self, end: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Status::Ready => "its turn",
            Status::Lock(_) => "a lock",
            Status::Condition { .. } => "a notification",
            Status::Done => "nothing",
        })
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a message").to_owned()
}

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests {
    use super::*;
    use crate::fork;

    type Log = Arc<fork::Mutex<Vec<(u32, u32)>>>;

    /// The order in which three threads reach their steps.
    fn order(seed: u64) -> Vec<(u32, u32)> {
        let log = Log::default();
        let bodies = (0..3).map(|thread| {
            let log = log.clone();
            Box::new(move || {
                for step in 0..10 {
                    log.lock().push((thread, step));
                    yield_now();
                }
            }) as Body
        });
        run(seed, 1000, bodies.collect()).unwrap();
        log.lock().clone()
    }

    #[test]
    fn a_seed_fixes_the_order() {
        for seed in 0..20 {
            assert_eq!(order(seed), order(seed), "{seed}");
        }
        assert!((1..20).any(|seed| order(seed) != order(0)));
    }

    #[test]
    fn a_lock_is_waited_for_while_its_holder_yields() {
        for seed in 0..100 {
            let counter = Arc::<fork::Mutex<u32>>::default();
            let bodies = (0..4).map(|_| {
                let counter = counter.clone();
                Box::new(move || {
                    for _ in 0..5 {
                        let mut counter = counter.lock();
                        let before = *counter;
                        yield_now();
                        *counter = before + 1;
                    }
                }) as Body
            });
            run(seed, 10_000, bodies.collect()).unwrap();
            assert_eq!(*counter.lock(), 20);
        }
    }

    #[test]
    fn notifications_wake_threads_and_threads_that_are_started_take_part() {
        for seed in 0..100 {
            let shared = Arc::new((fork::Mutex::new(0_u32), fork::Condvar::default()));
            let body = {
                let shared = shared.clone();
                Box::new(move || {
                    for _ in 0..3 {
                        let shared = shared.clone();
                        spawn(Builder::new(), move || {
                            *shared.0.lock() += 1;
                            shared.1.notify_all();
                        })
                        .unwrap();
                    }
                    let mut count = shared.0.lock();
                    while *count < 3 {
                        count = shared.1.wait(count);
                    }
                }) as Body
            };
            run(seed, 1000, vec![body]).unwrap();
            assert_eq!(*shared.0.lock(), 3);
        }
    }

    #[test]
    fn a_timed_wait_ends_when_no_thread_can_go_on() {
        let body = || {
            let (mutex, condition) = (fork::Mutex::new(()), fork::Condvar::default());
            let (_guard, timed_out) = condition.wait_for(mutex.lock(), Duration::from_secs(3600));
            assert!(timed_out);
        };
        run(1, 1000, vec![Box::new(body)]).unwrap();
    }

    #[test]
    fn a_lock_that_a_thread_outside_holds_is_no_deadlock() {
        let lock = Arc::new(fork::Mutex::new(()));
        let (ours, held) = (lock.clone(), std::sync::mpsc::channel());
        let outside = std::thread::spawn(move || {
            let _guard = ours.lock();
            held.0.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        });
        held.1.recv().unwrap();
        run(1, 1000, vec![Box::new(move || drop(lock.lock()))]).unwrap();
        outside.join().unwrap();
    }

    #[test]
    fn threads_that_wait_for_each_other_are_found() {
        let found = (0..100).filter(|&seed| {
            let locks = Arc::new([fork::Mutex::new(()), fork::Mutex::new(())]);
            let bodies = [[0, 1], [1, 0]].map(|[first, second]| {
                let locks = locks.clone();
                Box::new(move || {
                    let _first = locks[first].lock();
                    yield_now();
                    drop(locks[second].lock());
                }) as Body
            });
            match run(seed, 1000, bodies.into()) {
                Ok(_) => false,
                Err(Failure::Stuck(threads)) => threads.len() == 2,
                Err(other) => panic!("{other}"),
            }
        });
        assert_eq!(found.take(2).count(), 2);
    }

    #[test]
    fn panics_and_endless_loops_are_reported() {
        let failure = run(1, 1000, vec![Box::new(|| panic!("found"))]).unwrap_err();
        assert_eq!(failure.to_string(), "thread 0: found");
        let endless = Box::new(|| {
            loop {
                yield_now();
            }
        });
        assert!(matches!(run(1, 1000, vec![endless]), Err(Failure::Endless(1000))));
        let (send, receive) = std::sync::mpsc::channel::<()>();
        let keeps = Box::new(move || _ = receive.recv());
        let kept = run_with(1, (1000, Duration::from_millis(50)), vec![keeps]);
        assert!(matches!(kept, Err(Failure::Keeps(name)) if name == "thread 0"));
        drop(send);
    }
}
