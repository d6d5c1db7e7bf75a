//! The backing `Paged`: physical granules, mapped into large address reservations wherever contiguous memory is needed.
//!
//! When no free block serves a request, a *window* is chosen: a stretch of free blocks and holes that becomes a free block large
//! enough once the fewest granules are put into its holes. Those come from *donors*, granules that lie wholly in free blocks
//! whose last use is done, and only where these do not suffice from the device. So memory held from the device follows what is in
//! use, and fragmentation costs addresses rather than memory.
//!
//! | file | idea |
//! | --- | --- |
//! | `granules.rs` | which granule is mapped where; spare ones |
//! | `places.rs` | the places of one reservation |
//! | `window.rs` | the place that needs the fewest granules |
//! | `donors.rs` | granules that may move, and ticks that would let more of them move |
//! | `plan.rs` | a remap as a whole, decided and held under the locks |
//! | `recurrence.rs` | whether a program comes back to where memory moved |
//! | `carry_out.rs` | its driver calls, and those of memory that grows, made without a lock; what they came to |
//! | `grow.rs` | from a request to a served one: plan, wait, carry out, commit |
//! | `gate.rs` | who may change mappings at a time |
//! | `trim.rs` | memory and addresses back to the device |
//! | `milestones.rs` | events recorded in time, so that the host knows what is done |
//! | `peers.rs` | access of other devices |
//! | `apart.rs` | memory outside of heaps, and what becomes of it |
//! | `memory_apart.rs` | what the handles of such memory share |
//! | `growable.rs` | memory that grows where it is |
//! | `exportable.rs` | memory that other processes can have a handle of |
//! | `pin.rs` | memory that stays where it is, because others know its address |
//! | `sleep.rs` | all memory away, and back, behind the same addresses |
//! | `probe.rs` | whether the device can map memory at all |
//!
//! Invariants, beside those of holes in the heap:
//! * **P1** A granule is unmapped only when its last use is known done on the host, and neither pinned nor in an open private pool,
//!   unless the pool itself is trimmed: a graph may use what is free there.
//! * **P2** A granule is in one place: mapped in one reservation, among the spares, or in the hands of one operation. While the
//!   allocator sleeps, nothing is mapped but what others know, and all other operations on mappings wait or are refused.
//! * **P3** `reserved` = mapped + spare granules + segments, at any time that no operation is in flight.
//! * **P4** While the driver is asked to change what is behind some addresses, they are held in the heap, so that two
//!   operations never touch the same ones. An operation that fails gives back all that it held. Memory apart from heaps has one
//!   owner, until it is retired and then recycled by one operation that is alone.
//!
//! Locks: decisions are made under all locks; no driver call, wait or observer runs under any of them, but under the gate, which
//! comes before them.

mod apart;
mod carry_out;
mod donors;
mod exportable;
mod gate;
mod granules;
mod grow;
mod growable;
mod memory_apart;
mod milestones;
mod peers;
mod pin;
mod places;
mod plan;
mod probe;
mod recurrence;
#[cfg(all(test, aquifer_shuttle))]
mod schedules;
mod sleep;
mod trim;
mod window;

pub(crate) use apart::{Owned, POOL};
pub use exportable::Exportable;
pub(crate) use gate::Gate;
pub(crate) use granules::Paged;
pub use growable::Growable;
pub(crate) use memory_apart::MemoryApart;
pub(crate) use milestones::{Milestones, record_milestone};
pub use pin::PinnedMapping;
pub(crate) use pin::Pins;
pub(crate) use probe::probe;
pub use sleep::Contents;
