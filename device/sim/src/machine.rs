//! The simulated device as one state machine: its parts, its virtual clock, and how work enters and
//! leaves.
//!
//! Each driver call enters through [`Machine::enter`], which counts it, injects faults, advances
//! virtual time and runs the work that is due. Work is checked when it is enqueued and takes effect
//! when it finishes.
//!
//! Invariants: virtual time never goes back; pending work finishes after `now`; once `lost` is set
//! nothing runs.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::internal::caller;
use aquifer_device::{Code, ErrorKind, Operation, PoolUsage};

use crate::address::{AddressSpace, QUARANTINED};
use crate::checks::{Checks, Misuse, Needed, Unwritten};
use crate::conditional::ConditionalNode;
use crate::config::SimConfig;
use crate::engine::Engine;
use crate::fault::FaultPlan;
use crate::handle::HandleTable;
use crate::host::HostBlocks;
use crate::memory::Memory;
use crate::module::Module;
use crate::objects::{CaptureState, CapturedGraph, EventState, PhysicalTable};
use crate::queue::StreamSet;
use crate::race::{Detector, Space};
use crate::refused::{Answer, Refused};
use crate::violation::{OpRef, Violation, ViolationKind, line};
use crate::work::{Body, Cause, HostPart, Touch};

/// Work that is scheduled.
#[derive(Debug)]
pub(crate) struct Pending {
    op: OpRef,
    body: Body,
    /// Bytes that were never written and that a kernel may read.
    unwritten: Unwritten,
}

/// Why the device was lost.
#[derive(Debug)]
struct Lost {
    code: Code,
    /// The work that failed, where, and why, or the fault that was injected.
    why: Box<str>,
}

impl Lost {
    fn refusal(&self) -> Refused {
        Refused::new(self.code, format!("the simulated device is lost: {}", self.why))
    }
}

/// The order in which scheduled work finishes: virtual time, then a random number, then the number
/// of the operation.
type FinishOrder = (u64, u64, u64);

/// Everything that changes in a simulated device.
#[derive(Debug)]
pub(crate) struct Machine {
    /// Virtual time in ns.
    pub(crate) now: u64,
    /// When all work enqueued so far is done, in virtual ns.
    pub(crate) horizon: u64,
    /// Driver calls so far.
    pub(crate) calls: u64,
    /// Virtual ns that driver calls cost the host so far, without waits and without injected
    /// delays.
    pub(crate) in_calls: u64,
    lost: Option<Lost>,
    /// Ordinal of the device.
    pub(crate) ordinal: u32,
    /// Whether it can map physical memory.
    pub(crate) vmm: bool,
    /// Whether its physical memory can be exported.
    pub(crate) export: bool,
    /// Operations numbered so far.
    op_count: u64,
    pub(crate) capture_count: u64,
    pub(crate) faults: FaultPlan,
    pub(crate) engine: Engine,
    pub(crate) memory: Memory,
    pub(crate) address: AddressSpace,
    pub(crate) physicals: PhysicalTable,
    pub(crate) host: HostBlocks,
    pub(crate) streams: StreamSet,
    pub(crate) events: HandleTable<EventState>,
    pub(crate) captures: BTreeMap<u64, CaptureState>,
    pub(crate) graphs: HandleTable<CapturedGraph>,
    pub(crate) conditionals: HandleTable<ConditionalNode>,
    pub(crate) modules: HandleTable<Module>,
    /// Usage of the driver's pool. It gives memory back at once, so all that it holds is in use.
    pub(crate) pool: PoolUsage,
    pub(crate) detector: Detector,
    pending: BTreeMap<FinishOrder, Pending>,
}

impl Machine {
    pub(crate) fn new(config: &SimConfig) -> Self {
        // Handles of different kinds and devices differ, so that mixing them up is noticed.
        let handles = |kind: u64| (u64::from(config.ordinal & 0xff_ffff) << 40) + (kind << 32);
        let checks = config.checks.then(|| Arc::new(Checks::default()));
        let quarantined = if config.checks { QUARANTINED } else { 0 };
        let detector = Detector::new(checks);
        Machine {
            now: 0,
            horizon: 0,
            calls: 0,
            in_calls: 0,
            lost: None,
            ordinal: config.ordinal,
            vmm: config.vmm,
            export: config.vmm && config.export,
            op_count: 0,
            capture_count: 0,
            faults: FaultPlan::new(&config.faults, config.seed),
            engine: Engine::new(config.card(), config.seed, config.jitter),
            memory: Memory::new(config.capacity_bytes, config.other_process_bytes),
            address: AddressSpace::new(config.ordinal, config.capacity_bytes, config.reuse, quarantined),
            physicals: PhysicalTable::new(handles(3)),
            host: HostBlocks::default(),
            streams: StreamSet::new(detector.known.device, handles(1)),
            events: HandleTable::new(handles(2)),
            captures: BTreeMap::new(),
            graphs: HandleTable::new(handles(4)),
            conditionals: HandleTable::new(handles(6)),
            modules: HandleTable::new(handles(5)),
            pool: PoolUsage::default(),
            detector,
            pending: BTreeMap::new(),
        }
    }

    /// Starts a driver call about `bytes` bytes: after this it may have effects.
    pub(crate) fn enter(&mut self, operation: Operation, bytes: u64) -> Answer<()> {
        self.calls += 1;
        self.check_lost()?;
        if self.streams.are_many_gone() {
            self.forget_known_streams();
        }
        let verdict = self.faults.strike(operation);
        // A request for more than there is fails before it could take long.
        let cost = self.engine.card().call_cost_ns(operation, bytes.min(self.memory.total()));
        if verdict.spike_ns > 0 {
            self.spend(verdict.spike_ns);
        }
        self.spend_in_call(cost)?;
        match verdict.code {
            None => Ok(()),
            Some(code) => {
                if code.kind() == ErrorKind::DeviceLost {
                    self.lose(code, "by an injected fault");
                }
                Err(Refused::new(code, "injected fault"))
            }
        }
    }

    /// Forgets operations of streams that are gone, once the host knows them complete. Otherwise
    /// clocks would grow with every stream that there ever was.
    fn forget_known_streams(&mut self) {
        let known = &self.detector.known;
        self.streams.forget_known(|stream, seq| known.knows(stream, seq));
    }

    /// Lets the time pass that a call itself takes. Fails if the device is lost meanwhile.
    pub(crate) fn spend_in_call(&mut self, ns: u64) -> Answer<()> {
        self.in_calls = self.in_calls.saturating_add(ns);
        self.spend(ns);
        self.check_lost()
    }

    pub(crate) fn check_lost(&self) -> Answer<()> {
        self.lost.as_ref().map_or(Ok(()), |lost| Err(lost.refusal()))
    }

    /// Loses the device, and returns the answer of calls from then on. Pending work never happens,
    /// so nothing can meet it in memory any more.
    pub(crate) fn lose(&mut self, code: Code, why: &str) -> Refused {
        self.pending.clear();
        self.detector.end();
        self.lost.get_or_insert_with(|| Lost { code, why: why.into() }).refusal()
    }

    /// Lets virtual time pass, running the work whose time comes.
    pub(crate) fn spend(&mut self, ns: u64) {
        self.run_until(self.now.saturating_add(ns));
    }

    #[inline]
    fn run_until(&mut self, time: u64) {
        if !self.pending.is_empty() {
            self.run_pending(time);
        }
        self.now = self.now.max(time);
    }

    fn run_pending(&mut self, time: u64) {
        while let Some(entry) = self.pending.first_entry() {
            if entry.key().0 > time {
                break;
            }
            let pending = entry.remove();
            self.run(&pending);
        }
    }

    /// The host waits until `time`. Fails if the device is lost meanwhile.
    pub(crate) fn wait_until(&mut self, time: u64) -> Answer<()> {
        self.run_until(time);
        self.check_lost()
    }

    /// The host waits for all work, and knows it complete.
    pub(crate) fn wait_for_all(&mut self) -> Answer<()> {
        self.wait_until(self.horizon)?;
        let everything = self.streams.everything();
        self.detector.known.learn(&everything);
        self.detector.forget_own();
        Ok(())
    }

    fn run(&mut self, pending: &Pending) {
        if let Body::PoolFree { memory } = &pending.body {
            let freed = self.address.allocation_mut(memory.start);
            if freed.is_some_and(|freed| !freed.of_graph && freed.freed == Some(pending.op)) {
                self.drop_allocation(memory.start, pending.op);
            }
            return;
        }
        let (ran, read) = pending.body.run(&mut self.memory, &self.address, &pending.unwritten);
        if let Some((range, origin)) = read {
            self.report_unwritten(pending.op, vec![(range, origin)]);
        }
        if let Err(broken) = ran {
            let why = self.explain_broken(pending.op, broken.cause);
            tracing::error!(code = broken.code.name(), %why, "the simulated device is lost");
            self.lose(broken.code, &why);
        }
    }

    /// Why work failed, in words. Reports a violation that shows only when the work runs.
    fn explain_broken(&mut self, op: OpRef, cause: Cause) -> String {
        match cause {
            Cause::Reported(violation) => violation.to_string(),
            Cause::Other(why) => format!("{op}: {why}"),
            Cause::Undeclared(range) => {
                let missing = "the launch did not declare that it touches this".to_owned();
                let kind = ViolationKind::Undeclared;
                let violation = Violation { kind, first: None, second: op, range, missing, block: None };
                let why = violation.to_string();
                self.detector.report(violation);
                why
            }
        }
    }

    /// Frees an allocation.
    pub(crate) fn drop_allocation(&mut self, ptr: u64, by: OpRef) {
        if let Some(kept) = self.address.allocation_mut(ptr).filter(|kept| kept.of_graph) {
            kept.freed = Some(by);
            return;
        }
        if let Some(allocation) = self.address.remove_allocation(ptr, by) {
            self.memory.destroy(allocation.store);
            self.checks().inspect(|checks| checks.removed(ptr..ptr + allocation.bytes));
            if allocation.pool {
                self.pool_holds(self.pool.used.saturating_sub(allocation.bytes));
            }
        }
    }

    /// Frees pool memory once all work enqueued so far is done.
    pub(crate) fn free_at_horizon(&mut self, memory: Range<u64>) {
        let op = self.op_ref(None, Operation::FreeAsync, None);
        if let Some(allocation) = self.address.allocation_mut(memory.start) {
            allocation.freed = Some(op);
        }
        let free = Pending { op, body: Body::PoolFree { memory }, unwritten: Vec::new() };
        self.pending.insert((self.horizon.max(self.now), self.engine.lot(), op.number), free);
    }

    /// Notes how much the driver's pool holds now.
    pub(crate) fn pool_holds(&mut self, bytes: u64) {
        let peak = self.pool.used_peak.max(bytes);
        self.pool = PoolUsage { used: bytes, used_peak: peak, reserved: bytes, reserved_peak: peak, graphs: 0 };
    }

    /// Runs the earliest pending pool free and all work before it. False when none is pending.
    pub(crate) fn wait_for_pool_free(&mut self) -> Answer<bool> {
        let is_free = |pending: &Pending| matches!(pending.body, Body::PoolFree { .. });
        match self.pending.iter().find(|(_, pending)| is_free(pending)) {
            Some((&(time, ..), _)) => self.wait_until(time).map(|()| true),
            None => Ok(false),
        }
    }

    /// Numbers and names an operation, of a stream or of the host.
    pub(crate) fn op_ref(&mut self, stream: Option<u32>, operation: Operation, kernel: Option<&'static str>) -> OpRef {
        self.op_count += 1;
        let stream = stream.and_then(|id| self.streams.get(id).ok()).map(|stream| stream.name);
        OpRef { operation: Some(operation), kernel, number: self.op_count, stream, peer: None, at: caller() }
    }

    /// The checks of how memory is used, unless they are off.
    pub(crate) fn checks(&self) -> Option<&Arc<Checks>> {
        self.detector.checks.as_ref()
    }

    /// Checks that each range of device memory lies in one live block, and that no other live block
    /// is mapped to the same physical memory. Returns the blocks that a graph of this work needs.
    pub(crate) fn check_blocks(&mut self, op: OpRef, touches: &[Touch]) -> Vec<Needed> {
        let Some(checks) = self.checks().cloned() else { return Vec::new() };
        let mut needed = Vec::new();
        for touch in touches.iter().filter(|touch| touch.space == Space::Device) {
            let aliases = touch.aliases(&self.physicals, &self.address.mappings);
            let checked = checks.check(&touch.range).map(|block| needed.extend(block)).err();
            let aliased = aliases.iter().filter_map(|alias| checks.check_alias(&touch.range, alias));
            for misuse in checked.into_iter().chain(aliased) {
                let Misuse { kind, at, block, why } = *misuse;
                let range = at..touch.range.end;
                self.detector.report(Violation { kind, first: None, second: op, range, missing: why, block });
            }
        }
        needed
    }

    /// Notes how work changes memory that was never written, and reports such bytes that it reads.
    /// Returns those that it may read when it runs.
    fn check_written(&mut self, op: OpRef, body: &Body) -> Unwritten {
        let Some(reads) = self.checks().map(|checks| checks.run(body)) else { return Vec::new() };
        self.report_unwritten(op, reads.all);
        reads.perhaps
    }

    fn report_unwritten(&mut self, op: OpRef, pieces: Unwritten) {
        let bytes: u64 = pieces.iter().map(|(piece, _)| piece.end - piece.start).sum();
        let Some((range, origin)) = pieces.into_iter().next() else { return };
        let block = self.checks().and_then(|checks| checks.block_at(range.start));
        let mut missing = format!("{bytes} of the bytes that it reads were never written");
        // A copy may have brought them here from elsewhere.
        if let Some(at) = origin.filter(|&at| block.as_ref().is_none_or(|block| block.allocated != Some(at))) {
            missing.push_str(&format!("; the memory was allocated at {}", line(at)));
        }
        let kind = ViolationKind::NeverWritten;
        self.detector.report(Violation { kind, first: None, second: op, range, missing, block });
    }

    /// Enqueues work on a stream, or captures it. Returns when it will be done, unless it was
    /// captured.
    pub(crate) fn submit(&mut self, id: u32, body: Body) -> Answer<Option<Submitted>> {
        self.submit_checked(id, body, true)
    }

    /// As [`Machine::submit`]. The blocks of work that was captured before were checked then.
    pub(crate) fn submit_checked(&mut self, id: u32, body: Body, is_new: bool) -> Answer<Option<Submitted>> {
        match self.capture_work(id, body, is_new)? {
            None => Ok(None),
            Some(body) => self.enqueue(id, body, is_new).map(Some),
        }
    }

    fn enqueue(&mut self, id: u32, mut body: Body, is_new: bool) -> Answer<Submitted> {
        self.streams.arrive(id);
        let op = self.op_ref(Some(id), body.operation(), body.kernel());
        let epoch = self.streams.step(id, op)?;
        let cost = body.cost();
        let freed = |part: &HostPart| Some((part.block.range(part.offset, part.bytes), self.host.freed(&part.block)?));
        if let Some((range, by)) = body.host_parts().into_iter().find_map(freed) {
            let missing = format!("the pinned memory was taken away by {by}");
            let kind = ViolationKind::UseAfterFree;
            let violation = Violation { kind, first: Some(by), second: op, range, missing, block: None };
            body = Body::Fault { violation: violation.to_string().into() };
            self.detector.report(violation);
        }
        let touches = body.touches();
        for touch in touches.iter().filter(|touch| touch.space == Space::Device) {
            if let Err(illegal) = self.address.check(touch.range.clone()) {
                let block = self.checks().and_then(|checks| checks.block_at(touch.range.start));
                let violation = Violation { block, ..illegal.violation(op, &touch.range) };
                body = Body::Fault { violation: violation.to_string().into() };
                self.detector.report(violation);
            }
        }
        let mut unwritten = Vec::new();
        if !matches!(body, Body::Fault { .. }) {
            if is_new {
                self.check_blocks(op, &touches);
            }
            unwritten = self.check_written(op, &body);
            let clock = &self.streams.get(id)?.clock;
            for touch in touches {
                let aliases = touch.aliases(&self.physicals, &self.address.mappings);
                self.detector.access(touch, &aliases, epoch, clock);
            }
        }
        let now = self.now;
        let stream = self.streams.get(id)?;
        let finish = self.engine.schedule(now, stream.tail.max(now), cost);
        stream.tail = finish;
        self.horizon = self.horizon.max(finish);
        self.pending.insert((finish, self.engine.lot(), op.number), Pending { op, body, unwritten });
        Ok(Submitted { finish, op })
    }
}

/// Work that was enqueued.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Submitted {
    /// When it will be done, in virtual ns.
    pub(crate) finish: u64,
    pub(crate) op: OpRef,
}
