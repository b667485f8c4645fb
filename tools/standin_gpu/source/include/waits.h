// What each rank waits for in collectives, shared between the processes of a run.
#pragma once
#include <string>
#include <vector>

namespace standin {

// A process group or communicator: its name, and the ranks of its members in their program. Programs with worlds of
// their own, as separate engines, have the same ranks. `processes` tells their members apart. It is empty before the
// group's first communicator.
struct Group {
    std::string name;
    std::vector<int> ranks;
    std::vector<int> processes = {};
};

// torch's group whose collective this thread calls; without a name outside one.
void set_group(Group group);
const Group& current_group();
// RANK, or else the process.
int own_rank();
// Adds the members of a communicator to those that `processes_of` returns for the group of this name.
void note_processes(const Group& group);
std::vector<int> processes_of(const std::string& group_name);
// In place of a process, of a call that waits for no certain one.
constexpr int kNoProcess = 0;

// While it exists, other processes can see that this thread is in a call of the group. `is_running`: the call waits for
// its peers; otherwise the host may wait for earlier work, before the call begins. `peer` is the process whose message
// the call waits for at the moment.
class WaitSlot {
public:
    WaitSlot(const Group& group, const std::string& text, bool is_running, int peer = kNoProcess);
    ~WaitSlot();
    WaitSlot(const WaitSlot&) = delete;
    WaitSlot& operator=(const WaitSlot&) = delete;

private:
    unsigned long long number_;
};

// Names the calls of ranks that wait for each other in different groups, from a call of this process on, which waits for
// `peer`. Also those of two ranks that wait for each other's messages in different calls of one group. "" unless there are
// such ranks.
std::string order_fault(const Group& group, const std::string& text, int peer);

}  // namespace standin
