//! Ticks as programs hold them.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Timeline;
use crate::error::Result;
use crate::release::Uses;

/// A point on a stream's timeline, which stands for all work enqueued on the stream until the tick
/// was taken.
///
/// Taking and holding a tick costs no driver call: an event is recorded only when something must
/// wait for the tick. See [`crate::Stream::tick`] and [`crate::Stream::wait_for`].
#[derive(Clone, Debug)]
pub struct Tick {
    pub(crate) timeline: Arc<Timeline>,
    pub(crate) n: u64,
}

impl Timeline {
    /// The tick that stands for all work enqueued on the stream so far. No driver call, no lock.
    pub fn tick(self: &Arc<Self>) -> Tick {
        self.tick_at(self.now())
    }

    /// The tick that was taken when [`Timeline::now`] returned `n`.
    pub fn tick_at(self: &Arc<Self>, n: u64) -> Tick {
        Tick { timeline: self.clone(), n }
    }
}

impl Tick {
    /// The timeline it lies on.
    #[doc(hidden)]
    pub fn timeline(&self) -> &Arc<Timeline> {
        &self.timeline
    }

    /// Its place on the timeline: the number of events recorded there before.
    pub fn n(&self) -> u64 {
        self.n
    }

    /// True if the work is already known to be done. No driver call, no lock.
    #[inline]
    pub fn is_known_done(&self) -> bool {
        self.timeline.is_known_done(self.n)
    }

    /// True if the work is done. Asks the driver about events recorded so far and records none, so a
    /// tick that no event covers is never known to be done: call [`Tick::cover`] first.
    ///
    /// # Errors
    /// Errors of the driver's event query.
    pub fn is_done(&self) -> Result<bool> {
        self.timeline.is_done(self.n)
    }

    /// Makes sure an event covers the tick, recording one if need be.
    ///
    /// # Errors
    /// When the stream is gone without a last event, because it captured, was lent, was destroyed
    /// by its owner, or the driver refused to record, until the host has waited for the device
    /// ([`Tick::synchronize`], [`crate::Device::synchronize`]); errors of the driver's event calls.
    pub fn cover(&self) -> Result<()> {
        self.timeline.cover(self.n)
    }

    /// Waits on the host until the work is done.
    ///
    /// # Errors
    /// Errors of the driver's event and synchronisation calls.
    pub fn synchronize(&self) -> Result<()> {
        self.timeline.synchronize(self.n)?;
        self.timeline.context().settle_left();
        Ok(())
    }
}

impl Uses for Vec<Tick> {
    fn are_known_done(&self) -> bool {
        self.iter().all(Tick::is_known_done)
    }

    fn cover(&self) -> Result<()> {
        self.iter().map(Tick::cover).fold(Ok(()), Result::and)
    }

    fn ask(&self, asked: &mut BTreeSet<u32>) -> Result<()> {
        let unknown = self.iter().filter(|tick| !tick.is_known_done() && asked.insert(tick.timeline.id()));
        unknown.map(|tick| tick.is_done().map(drop)).fold(Ok(()), Result::and)
    }
}
