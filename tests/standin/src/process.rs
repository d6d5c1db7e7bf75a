//! What the process holds: devices, contexts, and what a device is while it has contexts.
//!
//! A *life* of a device begins with its first context and ends with its last; all that was made in
//! it ends with it, a lost device is well again in the next, as with CUDA's contexts. Contexts of
//! one device share its life: they do not have address spaces or handles of their own as CUDA's
//! have. After its end a life can still be looked at, until the next one begins.
//!
//! Devices of the environment are counted by `cuDeviceGetCount`. Those that a test adds come after
//! them and are not counted, so that tests in parallel do not see each other's; they are opened by
//! ordinal like any other.
//!
//! Locks, in the order in which they may be held together: devices · ghosts · a device's life ·
//! contexts · a life's tables. None is held across a call of the simulated device, but the one on
//! modules and graphs where that is said.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use aquifer_device::Code;
use aquifer_sim::{SimConfig, SimDriver};
use parking_lot::{Mutex, RwLock};

use crate::abi::{Answer, CONTEXT_IS_DESTROYED, Handle, INVALID_CONTEXT, UNKNOWN};
use crate::capture::Captures;
use crate::conditional::Conditionals;
use crate::environment::Environment;
use crate::fail::Orders;
use crate::graphs::Graphs;
use crate::host::Pinned;
use crate::modules::Modules;
use crate::pools::PoolSettings;
use crate::streams::StreamTable;
use crate::thread;
use crate::user_objects::{self, UserObjects};

/// Most devices at a time: their address spaces must differ.
const DEVICES_MAX: usize = 4096;

/// First handle of contexts, far from those of other things.
const FIRST_CONTEXT: u64 = 0xC0_0000_0000_0000;

/// The driver of this process.
pub(crate) struct Process {
    environment: Result<Environment, String>,
    orders: Option<Mutex<Orders>>,
    started: AtomicBool,
    devices: RwLock<Vec<Option<Arc<Device>>>>,
    /// Removed devices whose primary context another library still retains, and how often. Their
    /// ordinals are not used again until it is released, which would else release another device's.
    ghosts: Mutex<BTreeMap<u32, u32>>,
    contexts: RwLock<BTreeMap<Handle, Arc<Context>>>,
    next_context: AtomicU64,
}

static PROCESS: LazyLock<Process> = LazyLock::new(|| Process::new(Environment::read()));

impl Process {
    /// The driver of this process.
    pub(crate) fn get() -> &'static Process {
        &PROCESS
    }

    fn new(environment: Result<Environment, String>) -> Process {
        let process = Process {
            orders: environment
                .as_ref()
                .ok()
                .filter(|environment| !environment.orders.is_empty())
                .map(|environment| Mutex::new(Orders::new(environment.orders.clone()))),
            started: AtomicBool::new(false),
            devices: RwLock::default(),
            ghosts: Mutex::default(),
            contexts: RwLock::default(),
            next_context: AtomicU64::new(FIRST_CONTEXT),
            environment,
        };
        for config in process.environment.iter().flat_map(|environment| &environment.devices) {
            process.add_device(config.clone());
        }
        process
    }

    /// What the environment says, or what is wrong with it.
    pub(crate) fn environment(&self) -> Result<&Environment, &str> {
        self.environment.as_ref().map_err(String::as_str)
    }

    /// Functions that are to fail in every thread.
    pub(crate) fn orders(&self) -> Option<&Mutex<Orders>> {
        self.orders.as_ref()
    }

    pub(crate) fn is_started(&self) -> bool {
        self.started.load(Ordering::Acquire)
    }

    /// `cuInit`.
    pub(crate) fn start(&self) -> Answer {
        let environment = self.environment().map_err(|error| {
            eprintln!("aquifer-standin: {error}");
            UNKNOWN
        })?;
        if environment.devices.is_empty() && self.devices.read().is_empty() {
            return Err(Code::NO_DEVICE);
        }
        self.started.store(true, Ordering::Release);
        Ok(())
    }

    /// Devices of the environment.
    pub(crate) fn device_count(&self) -> usize {
        self.environment().map_or(0, |environment| environment.devices.len())
    }

    /// A live device by ordinal.
    pub(crate) fn device(&self, ordinal: i32) -> Option<Arc<Device>> {
        let place = usize::try_from(ordinal).ok()?;
        self.devices.read().get(place)?.clone()
    }

    /// The present lives of all devices but one, as far as they have begun.
    pub(crate) fn others(&self, life: &Arc<Life>) -> impl Iterator<Item = Arc<Life>> {
        let devices: Vec<_> = self.devices.read().iter().flatten().cloned().collect();
        let own = life.ordinal;
        devices.into_iter().filter(move |device| device.ordinal != own).filter_map(|device| device.present_life())
    }

    /// Adds a device at the lowest ordinal that is free, behind those of the environment. `None`
    /// when there are too many.
    pub(crate) fn add_device(&self, config: SimConfig) -> Option<u32> {
        let mut devices = self.devices.write();
        let ghosts = self.ghosts.lock();
        let is_ghost = |place| u32::try_from(place).is_ok_and(|ordinal| ghosts.contains_key(&ordinal));
        let mut places = devices.iter().enumerate();
        let place = match places.position(|(place, device)| device.is_none() && !is_ghost(place)) {
            Some(place) => place,
            None if devices.len() < DEVICES_MAX => {
                devices.push(None);
                devices.len() - 1
            }
            None => return None,
        };
        let ordinal = u32::try_from(place).ok()?;
        let primary = self.add_context(ordinal);
        devices[place] = Some(Arc::new(Device::new(config.ordinal(ordinal), primary)));
        Some(ordinal)
    }

    /// Removes a device that was added. Its contexts are destroyed. False when there is none, or it
    /// is the environment's.
    pub(crate) fn remove_device(&self, ordinal: u32) -> bool {
        let place = ordinal as usize;
        if place < self.device_count() {
            return false;
        }
        // Held to the end: the next device with this ordinal must not meet what is left of this
        // one.
        let mut devices = self.devices.write();
        let Some(device) = devices.get_mut(place).and_then(Option::take) else { return false };
        let retained = *device.primary.retained.lock();
        if retained > 0 {
            self.ghosts.lock().insert(ordinal, retained);
        }
        user_objects::end_hold(ordinal);
        let mut contexts = self.contexts.write();
        contexts.retain(|_, context| {
            let belongs = context.ordinal == ordinal;
            if belongs {
                context.end();
            }
            !belongs
        });
        true
    }

    /// Releases the primary context of a removed device once. False when there is no such device.
    pub(crate) fn release_ghost(&self, ordinal: i32) -> bool {
        let Ok(ordinal) = u32::try_from(ordinal) else { return false };
        let mut ghosts = self.ghosts.lock();
        let Some(retained) = ghosts.get_mut(&ordinal) else { return false };
        *retained -= 1;
        if *retained == 0 {
            ghosts.remove(&ordinal);
        }
        true
    }

    /// A context of a device that is not active yet.
    pub(crate) fn add_context(&self, ordinal: u32) -> Arc<Context> {
        let handle = self.next_context.fetch_add(1, Ordering::Relaxed);
        let context = Arc::new(Context { handle, ordinal, flags: AtomicU32::new(0), life: RwLock::new(None) });
        self.contexts.write().insert(handle, context.clone());
        context
    }

    /// A context by handle, destroyed ones included.
    pub(crate) fn context(&self, handle: Handle) -> Answer<Arc<Context>> {
        self.contexts.read().get(&handle).cloned().ok_or(INVALID_CONTEXT)
    }

    /// The calling thread's current context.
    pub(crate) fn current(&self) -> Answer<Arc<Context>> {
        self.context(thread::current().ok_or(INVALID_CONTEXT)?)
    }
}

/// A device.
pub(crate) struct Device {
    pub(crate) ordinal: u32,
    config: SimConfig,
    pub(crate) primary: Primary,
    state: Mutex<State>,
}

/// A device's primary context, and how often it is retained.
pub(crate) struct Primary {
    pub(crate) context: Arc<Context>,
    pub(crate) retained: Mutex<u32>,
}

/// What changes in a device.
struct State {
    /// The present life, the last one, or the one to come.
    life: Arc<Life>,
    begun: bool,
    /// Active contexts.
    contexts: u32,
    /// What the race detector found in earlier lives.
    past_violations: Vec<String>,
}

impl Device {
    fn new(config: SimConfig, primary: Arc<Context>) -> Device {
        let state = State { life: Life::new(&config), begun: false, contexts: 0, past_violations: Vec::new() };
        Device {
            ordinal: config.ordinal,
            config,
            primary: Primary { context: primary, retained: Mutex::new(0) },
            state: Mutex::new(state),
        }
    }

    /// The present life; the last one where there is no context.
    pub(crate) fn life(&self) -> Arc<Life> {
        self.state.lock().life.clone()
    }

    /// The life that a context has begun and not ended.
    fn present_life(&self) -> Option<Arc<Life>> {
        let state = self.state.lock();
        (state.contexts > 0).then(|| state.life.clone())
    }

    /// Makes a context active. The first one begins a life.
    pub(crate) fn activate(&self, context: &Context) {
        let mut state = self.state.lock();
        if state.contexts == 0 && std::mem::replace(&mut state.begun, true) {
            self.renew(&mut state);
        }
        state.contexts += 1;
        *context.life.write() = Some(state.life.clone());
    }

    /// Ends an active context. With the last one, the life ends.
    pub(crate) fn deactivate(&self, context: &Context) {
        let mut state = self.state.lock();
        if context.end() {
            state.contexts -= 1;
        }
    }

    /// `cuDevicePrimaryCtxReset`: a new life for the primary context, if that is active and alone.
    pub(crate) fn reset(&self) -> Answer {
        let mut state = self.state.lock();
        let active = self.primary.context.life.read().is_some();
        match (active, state.contexts) {
            (false, _) => Ok(()),
            (true, 1) => {
                self.renew(&mut state);
                *self.primary.context.life.write() = Some(state.life.clone());
                Ok(())
            }
            // The contexts of a device share a life here, so one of them cannot start afresh.
            (true, _) => Err(Code::NOT_SUPPORTED),
        }
    }

    fn renew(&self, state: &mut State) {
        let found = state.life.sim.violations();
        state.past_violations.extend(found.iter().map(ToString::to_string));
        state.life = Life::new(&self.config);
    }

    /// What the race detector found, in all lives; `take` forgets it.
    pub(crate) fn violations(&self, take: bool) -> Vec<String> {
        let mut state = self.state.lock();
        let mut all = state.past_violations.clone();
        all.extend(state.life.sim.violations().iter().map(ToString::to_string));
        if take {
            state.past_violations.clear();
            state.life.sim.take_violations();
        }
        all
    }
}

/// A context: a device's primary one, or one that the program created.
pub(crate) struct Context {
    pub(crate) handle: Handle,
    pub(crate) ordinal: u32,
    pub(crate) flags: AtomicU32,
    /// `None` while it is not active: not retained yet, released, or destroyed.
    life: RwLock<Option<Arc<Life>>>,
}

impl Context {
    /// What the context stands for, while it is active.
    pub(crate) fn life(&self) -> Answer<Arc<Life>> {
        self.life.read().clone().ok_or(CONTEXT_IS_DESTROYED)
    }

    /// Ends it. False when it was not active.
    fn end(&self) -> bool {
        self.life.write().take().is_some()
    }
}

/// One life of a device: the simulated device, and what CUDA knows beyond it.
pub(crate) struct Life {
    pub(crate) ordinal: u32,
    pub(crate) sim: Arc<SimDriver>,
    pub(crate) streams: StreamTable,
    pub(crate) captures: Captures,
    pub(crate) graphs: Graphs,
    pub(crate) user_objects: UserObjects,
    pub(crate) conditionals: Conditionals,
    pub(crate) modules: Modules,
    pub(crate) pinned: Pinned,
    pub(crate) pool: PoolSettings,
    /// Devices whose memory it was allowed to reach.
    pub(crate) peers: Mutex<BTreeSet<u32>>,
    /// Events created so far for which a waiting host would spin.
    pub(crate) spinning_events: AtomicU64,
    /// How often each function got as far as this device.
    calls: Mutex<BTreeMap<&'static str, u64>>,
}

impl Life {
    fn new(config: &SimConfig) -> Arc<Life> {
        Arc::new(Life {
            ordinal: config.ordinal,
            sim: SimDriver::new(config.clone()),
            streams: StreamTable::default(),
            captures: Captures::default(),
            graphs: Graphs::default(),
            user_objects: UserObjects::default(),
            conditionals: Conditionals::default(),
            modules: Modules::default(),
            pinned: Pinned::default(),
            pool: PoolSettings::default(),
            peers: Mutex::default(),
            spinning_events: AtomicU64::new(0),
            calls: Mutex::default(),
        })
    }

    /// Releases the user objects of launches that are done. A destructor tells the program that
    /// they are, so the host knows it from now on.
    pub(crate) fn settle_user_objects(&self) {
        self.user_objects.settle(|launch| self.sim.is_over(launch));
    }

    /// Counts a call.
    pub(crate) fn count(&self, name: &'static str) {
        self.settle_user_objects();
        *self.calls.lock().entry(name).or_default() += 1;
    }

    /// How often a function got as far as this device.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        self.calls.lock().get(name).copied().unwrap_or(0)
    }
}
