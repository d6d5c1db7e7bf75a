//! User objects: values of the program that live as long as graphs need them.
//!
//! An object has references. The caller owns some, graphs own others, and so do executables and
//! their launches in flight: an executable has copies of its graph's references, a launch of its
//! executable's. Once the last one is gone, the object's destructor runs, once, on a thread of the
//! driver, and not before the call ends that removed the reference (CUDA programming guide, "CUDA
//! User Objects"). References of a conditional node's body belong to the graph with the node.
//!
//! Locks, in this order: a life's graphs, its objects, the destructors of all lives.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::c_void;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use aquifer_device::Code;
use aquifer_sim::LaunchEnd;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::abi::{Answer, Handle, Out, UNKNOWN, abi, check_flags, needed};
use crate::process::Life;
use crate::thread as own;

/// First handle.
const FIRST: Handle = 0x6E_0000_0000_0000;

/// The destructor cannot be waited for by a call; required.
const NO_DESTRUCTOR_SYNC: u32 = 1;
/// A graph takes references of the caller instead of new ones.
const MOVE: u32 = 1;
/// Most references at a time.
const COUNT_MAX: u32 = i32::MAX.cast_unsigned();

type Destroy = unsafe extern "C" fn(*mut c_void);

/// A user object. Its last reference drops it.
#[derive(Debug)]
struct UserObject {
    destroy: Destroy,
    value: usize,
    /// The device that it was made on, for [`hold`].
    ordinal: u32,
}

impl Drop for UserObject {
    fn drop(&mut self) {
        DESTRUCTORS.add(Due {
            destroy: self.destroy,
            value: self.value,
            ordinal: self.ordinal,
            in_call_of: own::note_last_reference().then(|| thread::current().id()),
        });
    }
}

/// References of one owner: objects by handle, and how many references to each.
#[derive(Clone, Debug, Default)]
pub(crate) struct References(BTreeMap<Handle, (Arc<UserObject>, u32)>);

impl References {
    fn add(&mut self, handle: Handle, object: &Arc<UserObject>, count: u32) -> Answer {
        let (_, held) = self.0.entry(handle).or_insert_with(|| (object.clone(), 0));
        *held = held.checked_add(count).filter(|&sum| sum <= COUNT_MAX).ok_or(Code::INVALID_VALUE)?;
        Ok(())
    }

    fn remove(&mut self, handle: Handle, count: u32) -> Answer {
        let (_, held) = self.0.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
        *held = held.checked_sub(count).ok_or(Code::INVALID_VALUE)?;
        if *held == 0 {
            self.0.remove(&handle);
        }
        Ok(())
    }
}

/// The user objects of a device.
#[derive(Debug, Default)]
pub(crate) struct UserObjects(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    created: u64,
    callers: References,
    /// By graph, one that is being captured included, and by executable.
    graphs: HashMap<Handle, References>,
    /// Launches in flight, each with its end. One without a known end holds them as long as the
    /// device.
    launches: Vec<(Option<LaunchEnd>, References)>,
}

impl Table {
    fn find(&self, handle: Handle) -> Answer<Arc<UserObject>> {
        let mut owners = std::iter::once(&self.callers).chain(self.graphs.values());
        let found = owners.find_map(|owner| owner.0.get(&handle));
        found.map(|(object, _)| object.clone()).ok_or(Code::INVALID_VALUE)
    }
}

impl UserObjects {
    /// A graph or an executable gets copies of a graph's references instead of those that it has.
    pub(crate) fn copy(&self, from: Handle, to: Handle) {
        let mut table = self.0.lock();
        let references = table.graphs.get(&from).cloned().unwrap_or_default();
        table.graphs.insert(to, references);
    }

    /// A graph gets copies of another graph's references.
    pub(crate) fn add(&self, from: Handle, to: Handle) -> Answer {
        let mut table = self.0.lock();
        let added = table.graphs.get(&from).cloned().unwrap_or_default();
        let owner = table.graphs.entry(to).or_default();
        added.0.iter().try_for_each(|(&handle, (object, count))| owner.add(handle, object, *count))
    }

    /// A graph or an executable is gone.
    pub(crate) fn forget(&self, graph: Handle) {
        self.0.lock().graphs.remove(&graph);
    }

    /// The references that a launch of an executable holds.
    pub(crate) fn of_launch(&self, executable: Handle) -> References {
        self.0.lock().graphs.get(&executable).cloned().unwrap_or_default()
    }

    /// A launch holds references until its end.
    pub(crate) fn note_launch(&self, end: Option<LaunchEnd>, references: References) {
        if !references.0.is_empty() {
            self.0.lock().launches.push((end, references));
        }
    }

    /// Releases what launches hold that are over.
    pub(crate) fn settle(&self, is_over: impl Fn(&LaunchEnd) -> bool) {
        self.0.lock().launches.retain(|(end, _)| !end.as_ref().is_some_and(&is_over));
    }
}

impl Life {
    fn create_user_object(
        &self,
        out: Out<'_, Handle>,
        value: usize,
        destroy: Option<Destroy>,
        count: u32,
        flags: u32,
    ) -> Answer {
        let (out, destroy) = (needed(out)?, needed(destroy)?);
        if flags != NO_DESTRUCTOR_SYNC {
            return Err(Code::INVALID_VALUE);
        }
        check_count(count)?;
        DESTRUCTORS.start()?;
        let mut table = self.user_objects.0.lock();
        table.created += 1;
        let handle = FIRST + table.created;
        let object = UserObject { destroy, value, ordinal: self.ordinal };
        table.callers.add(handle, &Arc::new(object), count)?;
        out.write(handle);
        Ok(())
    }

    fn retain_user_object(&self, graph: Handle, object: Handle, count: u32, flags: u32) -> Answer {
        check_count(count)?;
        check_flags(flags, MOVE)?;
        let graph = self.owner_of(graph)?;
        let mut table = self.user_objects.0.lock();
        let found = table.find(object)?;
        let Table { callers, graphs, .. } = &mut *table;
        graphs.entry(graph).or_default().add(object, &found, count)?;
        if flags & MOVE != 0 {
            callers.remove(object, count).inspect_err(|_| {
                graphs.get_mut(&graph).map(|graph| graph.remove(object, count));
            })?;
        }
        Ok(())
    }

    fn release_user_object(&self, graph: Handle, object: Handle, count: u32) -> Answer {
        check_count(count)?;
        let graph = self.owner_of(graph)?;
        let mut table = self.user_objects.0.lock();
        table.graphs.get_mut(&graph).ok_or(Code::INVALID_VALUE)?.remove(object, count)
    }

    /// The graph that owns the references of a graph, which may be under construction. It differs
    /// for the body of a conditional node.
    fn owner_of(&self, graph: Handle) -> Answer<Handle> {
        let owner = self.conditionals.graph_with(graph);
        let is_live = self.is_being_captured(owner) || self.graphs.is_graph(owner);
        if is_live { Ok(owner) } else { Err(Code::INVALID_VALUE) }
    }
}

fn check_count(count: u32) -> Answer {
    if (1..=COUNT_MAX).contains(&count) { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

/// A destructor that is to run.
struct Due {
    destroy: Destroy,
    value: usize,
    ordinal: u32,
    /// The thread whose call removed the last reference, until that call ends.
    in_call_of: Option<ThreadId>,
}

/// The destructors that are due on all devices, and the thread that runs them.
struct Destructors {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    due: Vec<Due>,
    /// Devices whose destructors wait.
    held: BTreeSet<u32>,
    /// The device of the one that runs.
    running: Option<u32>,
    has_thread: bool,
}

static DESTRUCTORS: Destructors = Destructors {
    state: Mutex::new(State { due: Vec::new(), held: BTreeSet::new(), running: None, has_thread: false }),
    changed: Condvar::new(),
};

impl Destructors {
    /// Starts the thread, unless it runs.
    fn start(&'static self) -> Answer {
        let mut state = self.state.lock();
        if !state.has_thread {
            let run = move || self.run();
            thread::Builder::new().name("cuda-user-objects".to_owned()).spawn(run).map_err(|_| UNKNOWN)?;
            state.has_thread = true;
        }
        Ok(())
    }

    fn run(&self) {
        own::enter_host_functions();
        let mut state = self.state.lock();
        loop {
            let State { due, held, .. } = &*state;
            let next = due.iter().position(|due| due.in_call_of.is_none() && !held.contains(&due.ordinal));
            let Some(next) = next else {
                self.changed.wait(&mut state);
                continue;
            };
            let Due { destroy, value, ordinal, .. } = state.due.remove(next);
            state.running = Some(ordinal);
            MutexGuard::unlocked(&mut state, || {
                // SAFETY: the program vouched for the pair when it created the object.
                unsafe { destroy(std::ptr::with_exposed_provenance_mut(value)) };
            });
            state.running = None;
            self.changed.notify_all();
        }
    }

    fn add(&self, due: Due) {
        self.state.lock().due.push(due);
        self.changed.notify_all();
    }
}

/// The calling thread's call ends, which removed the last reference of an object.
pub(crate) fn call_ended() {
    let thread = thread::current().id();
    let mut state = DESTRUCTORS.state.lock();
    state.due.iter_mut().filter(|due| due.in_call_of == Some(thread)).for_each(|due| due.in_call_of = None);
    DESTRUCTORS.changed.notify_all();
}

/// Keeps destructors of a device's objects from running.
pub(crate) fn hold(ordinal: u32) {
    DESTRUCTORS.state.lock().held.insert(ordinal);
}

/// Ends [`hold`].
pub(crate) fn end_hold(ordinal: u32) {
    DESTRUCTORS.state.lock().held.remove(&ordinal);
    DESTRUCTORS.changed.notify_all();
}

/// Waits for the destructors of a device's objects that are due.
pub(crate) fn wait(ordinal: u32) {
    let mut state = DESTRUCTORS.state.lock();
    while state.running == Some(ordinal) || state.due.iter().any(|due| due.ordinal == ordinal) {
        DESTRUCTORS.changed.wait(&mut state);
    }
}

abi! {
    /// Creates a user object, whose references the caller owns. The destructor must not call the
    /// driver.
    11030 cuUserObjectCreate(
        call, object: Out<'_, Handle>, value: *mut c_void, destroy: Option<Destroy>, count: u32, flags: u32,
    ) {
        call.life()?.create_user_object(object, value.expose_provenance(), destroy, count, flags)
    }

    /// Gives the caller more references.
    11030 cuUserObjectRetain(call, object: Handle, count: u32) {
        let life = call.life()?;
        check_count(count)?;
        let mut table = life.user_objects.0.lock();
        let found = table.find(object)?;
        table.callers.add(object, &found, count)
    }

    /// Gives up references of the caller.
    11030 cuUserObjectRelease(call, object: Handle, count: u32) {
        let life = call.life()?;
        check_count(count)?;
        life.user_objects.0.lock().callers.remove(object, count)
    }

    /// Gives a graph references, new ones or the caller's. The graph may be under construction.
    11030 cuGraphRetainUserObject(call, graph: Handle, object: Handle, count: u32, flags: u32) {
        call.life()?.retain_user_object(graph, object, count, flags)
    }

    /// Gives up references of a graph.
    11030 cuGraphReleaseUserObject(call, graph: Handle, object: Handle, count: u32) {
        call.life()?.release_user_object(graph, object, count)
    }
}
