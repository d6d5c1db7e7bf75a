//! The backing `Paged`: physical granules, mapped into large address reservations wherever
//! contiguous memory is needed.
//!
//! When no free block serves a request, a *window* is chosen: the stretch of free blocks and holes
//! that needs the fewest granules in its holes to become a free block large enough. Physical memory
//! comes in *frames* of one granule or several. Those for the window come from *donors*, that is,
//! they lie wholly in free blocks and their last use is done; only where these do not suffice is
//! memory taken from the device. So the memory held from the device follows what is in use, and
//! fragmentation costs addresses rather than memory.
//!
//! What is decided, and accounted for afterwards, is in `core/` (`paged/`, `remap/`, `sleep/`).
//! Here is what calls the driver:
//!
//! | file | idea |
//! | --- | --- |
//! | `carry_out.rs` | the driver calls of a remap, and of memory that grows, and their outcome |
//! | `fill.rs` | maps memory at given addresses: of memory that grows, and of graphs that lent theirs |
//! | `lend.rs` | lends the memory of idle graphs, and brings memory back before a launch |
//! | `grow.rs` | serves a request: drafts, waits, plans, carries out, commits, and tries again |
//! | `gate.rs` | who may change mappings at a time |
//! | `split.rs` | splitting frames that are partly in use, before a request is refused |
//! | `../trim.rs` | giving memory back to the device |
//! | `dedicated.rs` | memory outside of heaps, and its way back |
//! | `growable.rs` | memory that grows in place |
//! | `exportable.rs` | memory whose handle other processes can have |
//! | `pin.rs` | memory that stays where it is, because others know its address |
//!
//! Invariants, in addition to those of holes in the heap:
//! * **P1** A mapping is unmapped only when the last use through it is known done on the host, and
//!   when its frame is neither pinned nor in an open private pool, whose free memory a graph may
//!   use. Trimming the pool itself is an exception, and so is what idle graphs lend (`lend.rs`).
//! * **P2** A frame is in one place: mapped in one reservation, among the spares, or held by one
//!   operation. A frame that its stream reused before the device was done with it may also be mapped
//!   where it was before, at addresses that stay held until they are unmapped (`trim.rs`).
//!   While the allocator sleeps, nothing is mapped but what others know, and all other operations on
//!   mappings wait or are refused.
//! * **P3** `reserved` = mapped + spare frames + segments, at any time that no operation is in
//!   flight.
//! * **P4** While the driver is asked to change what is behind some addresses, they are held in the
//!   heap, so that two operations never touch the same ones. An operation that fails gives back all
//!   that it held. Dedicated memory has one owner, until its release is deferred and one operation
//!   recycles it alone.
//!
//! Locks: decisions are made under the allocator's lock. Driver calls, waits and observers run
//! without it, only under the gate, which comes before it.

pub(crate) mod carry_out;
pub(crate) mod dedicated;
pub(crate) mod exportable;
pub(crate) mod fill;
pub(crate) mod gate;
pub(crate) mod grow;
pub(crate) mod growable;
pub(crate) mod lend;
pub(crate) mod pin;
pub(crate) mod reserve;
#[cfg(all(test, aquifer_shuttle))]
pub(crate) mod schedules;
pub(crate) mod split;

pub use exportable::Exportable;
pub use growable::Growable;
pub use pin::PinnedMapping;
