//! Copies between devices: by the driver where both are of one kind, else by way of the host. Each device's memory
//! carries ticks of its own streams alone (invariant N5).

use std::fmt;

use aquifer_allocator::{Buffer, Turn};
use aquifer_device::{AccessKind, DeviceError, Stream, Tick};
use bytemuck::Pod;

use crate::capture;
use crate::counters::Direction;
use crate::error::TransferError;
use crate::pending::{OnStreams, Pending, Shared};
use crate::runtime::{NO_CAPTURE, Transfer};

/// Which way a copy from one device to another goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Route {
    /// Both ends are on one device.
    Same,
    /// From device to device, over what links them.
    Peer,
    /// From device to device by the driver, which goes by way of the host as the devices cannot reach each other.
    Staged,
    /// By way of page-locked memory of this crate, as the devices have different drivers. Waits on the host for the first half.
    ViaHost,
}

impl OnStreams for Route {
    fn ready_on(&self, _stream: &Stream) -> Result<(), TransferError> {
        Ok(())
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Route::Same => "on one device",
            Route::Peer => "from device to device",
            Route::Staged => "from device to device, staged by the driver",
            Route::ViaHost => "by way of the host",
        })
    }
}

impl Transfer {
    /// Which way a copy from the device of `peer` to this one goes.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn route_from(&self, peer: &Transfer) -> Result<Route, TransferError> {
        let (own, other) = (self.device(), peer.device());
        if own.id() == other.id() {
            return Ok(Route::Same);
        }
        if own.info().kind != other.info().kind {
            return Ok(Route::ViaHost);
        }
        let reach = own.info().ordinal == other.info().ordinal || own.driver().can_access_peer(other.info().ordinal)?;
        Ok(if reach { Route::Peer } else { Route::Staged })
    }

    /// Enqueues a copy from another device by the route, for a transfer that [`Transfer::count_from_peer`] counts.
    pub(super) fn begin_from_peer<T: Pod + Send + Sync>(
        &self,
        from: &Buffer<T>,
        peer: &Transfer,
        to: &mut Buffer<T>,
        route: Route,
    ) -> Result<Pending<Route>, TransferError> {
        if route == Route::ViaHost {
            let host = peer.to_vec(from)?.wait()?;
            return Ok(self.upload(host, to)?.map(move |()| route));
        }
        if from.bytes() == 0 {
            return Ok(Pending::ready(self.shared(), route));
        }
        let tick = self.enqueue_peer(from, peer, to)?;
        Ok(Pending::enqueued(self.shared(), tick, route))
    }

    /// Counts a transfer of so many bytes from another device; by way of the host both halves were counted.
    pub(super) fn count_from_peer(&self, route: Route, bytes: u64) {
        if route != Route::ViaHost && bytes > 0 {
            self.shared().tally.count(Direction::OnDevice, bytes);
        }
    }

    /// The copy runs on a stream of this device. A stream of the other one stands for it there: it takes the turn with the source, is
    /// waited for by the copy, and waits for it. So each device's memory carries ticks of its own streams alone.
    fn enqueue_peer<T: Pod + Send + Sync>(
        &self,
        from: &Buffer<T>,
        peer: &Transfer,
        to: &Buffer<T>,
    ) -> Result<Tick, TransferError> {
        let Shared { begun, kept, .. } = &**self.shared();
        kept.release();
        let (stream, there) = (self.next_stream(Direction::OnDevice), peer.next_stream(Direction::OnDevice));
        self.refuse_capture(stream)?;
        self.refuse_capture(there)?;
        // One turn for both, which waits for nobody while it keeps others from their turns.
        let (source, target) = (from.storage().as_ref(), to.storage().as_ref());
        let mut turn = Turn::of_streams(&[(there, source, AccessKind::Read), (stream, target, AccessKind::Write)])?;
        let _held_off = (capture::hold_off(stream, NO_CAPTURE)?, capture::hold_off(there, NO_CAPTURE)?);
        stream.wait_for(&there.tick())?;
        stream.copy_from_peer(to.ptr(), peer.device(), from.ptr(), to.bytes())?;
        let copied = stream.tick();
        let ordered = self.order_after(there, &copied);
        let is_unknown = ordered.as_ref().is_err_and(|error| !error.is_device_lost());
        if is_unknown {
            // Who writes the source tries again to come after the copy.
            turn.note_reader(source, &copied);
        }
        drop(turn);
        if is_unknown {
            tracing::debug!(
                "nobody can wait for a copy from another device; its source is kept until it is known to be done"
            );
            kept.keep(&copied, from.storage());
            begun.note_tick(&copied);
        }
        ordered?;
        peer.covered_tick(there);
        Ok(self.covered_tick(stream))
    }

    /// Makes a stream of another device come after a copy on this one that reads the other one's memory; or else the host.
    fn order_after(&self, stream: &Stream, copied: &Tick) -> Result<(), DeviceError> {
        let Err(error) = stream.wait_for(copied) else { return Ok(()) };
        tracing::debug!(%error, "a stream could not be made to wait for a copy to another device; the host waits");
        copied.synchronize().or_else(|_| self.device().synchronize())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use aquifer_allocator::{Allocator, Claim, Config};
    use aquifer_device::sim::{Fault, SimConfig, SimDriver};
    use aquifer_device::{Code, Device, Operation};

    use super::*;

    const LEN: usize = 1 << 20;

    struct World {
        sim: Arc<SimDriver>,
        transfer: Transfer,
        stream: Stream,
    }

    impl World {
        fn new(ordinal: u32) -> World {
            let sim = SimDriver::new(SimConfig::default().ordinal(ordinal));
            let device = Device::new(sim.clone());
            let transfer = Transfer::new(&Allocator::new(&device, Config::default()).unwrap()).unwrap();
            World { sim, transfer, stream: device.stream().unwrap() }
        }

        fn fails(&self, operation: Operation) {
            self.sim.inject(Fault::Nth { operation: Some(operation), nth: 1, code: Code(999) });
        }

        fn reserved(&self) -> u64 {
            self.transfer.allocator().memory_reserved()
        }
    }

    /// Two devices, memory on the first, and the outcome of copying it to the second where streams of the first cannot be ordered after
    /// the copy and so many ways to wait fail.
    fn copied(ways: usize) -> ([World; 2], Buffer<u32>, Result<Vec<u32>, TransferError>) {
        let [one, two] = [0, 1].map(World::new);
        let content = vec![7u32; LEN];
        let from = one.transfer.to_device(content, &one.stream).unwrap().wait().unwrap();
        let mut to = two.transfer.allocator().alloc(usize::try_from(LEN as u64).unwrap(), &two.stream).unwrap();
        one.fails(Operation::Wait);
        [Operation::SynchronizeEvent, Operation::Synchronize].into_iter().take(ways).for_each(|way| two.fails(way));
        let copied = two.transfer.copy_from(&one.transfer, &from, &mut to, None);
        let result = copied.and_then(Pending::wait).and_then(|_| two.transfer.to_vec(&to)?.wait());
        ([one, two], from, result)
    }

    #[test]
    fn a_copy_that_waits_for_a_claim_on_one_end_keeps_nobody_from_the_other_end() {
        for claims_source in [false, true] {
            let [one, two] = [0, 1].map(World::new);
            let mut buffers = [&one, &two].map(|world| {
                let zeros = vec![0u32; LEN];
                world.transfer.to_device(zeros, &world.stream).unwrap().wait().unwrap()
            });
            for source in [0, 1] {
                let [first, second] = &mut buffers;
                let (from, peer, to, own) =
                    if source == 0 { (first, &one, second, &two) } else { (second, &two, first, &one) };
                let storages = [from.storage().clone(), to.storage().clone()];
                let (claimed, free) = if claims_source { (0, 1) } else { (1, 0) };
                let stream = if (free == 0) == (source == 0) { &one.stream } else { &two.stream };
                let claim = Claim::take(&storages[claimed], AccessKind::Write).unwrap();
                std::thread::scope(|scope| {
                    let copy = scope.spawn(|| own.transfer.copy_from(&peer.transfer, from, to, None).unwrap().wait());
                    // The thread that is to end the claim needs the other end first. Were that held, neither could go on.
                    for _ in 0..1000 {
                        drop(Turn::take(stream, &[(&storages[free], AccessKind::Write)]).unwrap());
                        std::thread::yield_now();
                    }
                    drop(claim);
                    assert_eq!(copy.join().unwrap().unwrap(), Route::Peer);
                });
            }
        }
    }

    #[test]
    fn the_host_waits_for_a_copy_that_streams_cannot_be_ordered_after() {
        for ways in [0, 1] {
            let (worlds, from, result) = copied(ways);
            assert_eq!(result.unwrap(), vec![7; LEN]);
            drop(from);
            worlds[0].transfer.allocator().empty_cache().unwrap();
            assert_eq!(worlds[0].reserved(), 0);
            worlds.iter().for_each(|world| assert_eq!(world.sim.violations(), []));
        }
    }

    /// Whether memory of a device's allocator is still there.
    fn is_kept(of: &World) -> bool {
        of.transfer.allocator().empty_cache().unwrap();
        of.reserved() >= LEN as u64 * 4
    }

    #[test]
    fn the_source_of_a_copy_that_nobody_can_wait_for_is_kept_until_that_is_done() {
        for writes in [false, true] {
            for asked_by in ["synchronize", "another copy", "its last handle"] {
                let ([one, two], mut from, result) = copied(2);
                assert!(matches!(result, Err(TransferError::Device(_))), "{result:?}");
                if writes {
                    one.transfer.kernels().unwrap().fill(&one.stream, &mut from, 9u32).unwrap();
                    assert_eq!(one.transfer.to_vec(&from).unwrap().wait().unwrap(), vec![9; LEN]);
                }
                drop(from);
                assert!(is_kept(&one));
                let sim = two.sim.clone();
                if asked_by == "synchronize" {
                    two.transfer.synchronize().unwrap();
                } else {
                    two.transfer.device().synchronize().unwrap();
                }
                if asked_by == "another copy" {
                    let small = one.transfer.to_device(vec![7u32; 10], &one.stream).unwrap().wait().unwrap();
                    let mut to = two.transfer.allocator().alloc(10, &two.stream).unwrap();
                    two.transfer.copy_from(&one.transfer, &small, &mut to, None).unwrap().wait().unwrap();
                }
                // A runtime that is left keeps nothing that it would let go of only when it is dropped.
                let _left = (asked_by != "its last handle").then_some(two);
                assert!(!is_kept(&one), "{asked_by}");
                assert_eq!((one.sim.violations(), sim.violations()), (vec![], vec![]));
            }
        }
    }

    #[test]
    fn the_source_of_a_copy_that_is_not_known_to_be_done_when_its_runtime_is_dropped_is_lost() {
        let ([one, two], from, _) = copied(2);
        let (sim, device) = (two.sim.clone(), two.transfer.device().clone());
        sim.inject(Fault::Rate { operation: Some(Operation::QueryEvent), rate: 1.0, code: Code(999) });
        drop((from, two));
        sim.clear_faults();
        device.synchronize().unwrap();
        assert!(is_kept(&one), "it is lost rather than reused");
        assert_eq!((one.sim.violations(), sim.violations()), (vec![], vec![]));
    }

    /// The record of an event that tells when the copy is done may have failed, too.
    #[test]
    fn the_source_of_a_copy_that_no_event_covered_is_let_go_of_by_who_waits() {
        for is_lost in [false, true] {
            let [one, two] = [0, 1].map(World::new);
            let from = one.transfer.to_device(vec![7u32; LEN], &one.stream).unwrap().wait().unwrap();
            let mut to = two.transfer.allocator().alloc(usize::try_from(LEN as u64).unwrap(), &two.stream).unwrap();
            two.sim.inject(Fault::Rate { operation: Some(Operation::Record), rate: 1.0, code: Code(999) });
            two.fails(Operation::Synchronize);
            let refused = two.transfer.on(&two.stream).unwrap().copy_from(&one.transfer, &from, &mut to, None);
            assert!(matches!(refused, Err(TransferError::Device(_))), "{refused:?}");
            drop(from);
            two.transfer.shared().kept.release();
            assert!(is_kept(&one));
            two.sim.clear_faults();
            if is_lost {
                two.sim.inject(Fault::LostAt { nth: 1 });
            }
            let waited = two.transfer.synchronize();
            assert_eq!(waited.is_err(), is_lost);
            assert!(!is_kept(&one));
            assert_eq!((one.sim.violations(), two.sim.violations()), (vec![], vec![]));
        }
    }
}
