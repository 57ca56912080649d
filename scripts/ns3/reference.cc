// Runs TCP flows over given paths in ns-3 and prints when each was done, for comparison.
//
// Input, a line each: `control NAME` (NewReno, CUBIC, DCTCP, BBR), `mss BYTES`, `window SEGMENTS`,
// `ssthresh BYTES`, `queue PACKETS`, `mark PACKETS` (a packet that finds more than so many waiting is
// marked), `seed NUMBER`, `sack 0` or `1` (with proportional rate reduction),
// `link A B BITS_PER_S DELAY_NS`, `flow ID BYTES START_NS NODE NODE …` (its path, hosts at both
// ends). Output: `ID NS`, from the first data packet to the arrival of the last
// byte; -1 if it did not arrive. Then `drops PACKETS` and `marks PACKETS`.
#include <cstdint>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "ns3/applications-module.h"
#include "ns3/core-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"
#include "ns3/ppp-header.h"
#include "ns3/traffic-control-module.h"

using namespace ns3;

namespace
{
struct Flow
{
    uint32_t id;
    uint64_t bytes;
    uint64_t startNs;
    std::vector<uint32_t> path;
    int64_t firstNs = -1;
    int64_t doneNs = -1;
    uint64_t received = 0;
};

std::vector<Flow> g_flows;
uint64_t g_drops = 0;
uint64_t g_marks = 0;

/// A device's queue that marks ECN-capable packets which find more than a threshold waiting. ns-3's
/// own marking disciplines sit above the device, whose queue holds further packets.
class MarkingQueue : public DropTailQueue<Packet>
{
  public:
    static TypeId GetTypeId()
    {
        static TypeId id = TypeId("ns3::MarkingQueue<Packet>")
                               .SetParent<DropTailQueue<Packet>>()
                               .AddConstructor<MarkingQueue>()
                               .AddAttribute("Mark",
                                             "Packets that may wait without a mark.",
                                             UintegerValue(0xffffffff),
                                             MakeUintegerAccessor(&MarkingQueue::m_mark),
                                             MakeUintegerChecker<uint32_t>());
        return id;
    }

    bool Enqueue(Ptr<Packet> packet) override
    {
        if (GetNPackets() > m_mark)
        {
            PppHeader ppp;
            Ipv4Header ip;
            packet->RemoveHeader(ppp);
            packet->RemoveHeader(ip);
            if (ip.GetEcn() == Ipv4Header::ECN_ECT0 || ip.GetEcn() == Ipv4Header::ECN_ECT1)
            {
                ip.SetEcn(Ipv4Header::ECN_CE);
                g_marks++;
            }
            packet->AddHeader(ip);
            packet->AddHeader(ppp);
        }
        bool kept = DropTailQueue<Packet>::Enqueue(packet);
        g_drops += !kept;
        return kept;
    }

  private:
    uint32_t m_mark = 0xffffffff;
};

NS_OBJECT_ENSURE_REGISTERED(MarkingQueue);

void
Sent(size_t flow, Ptr<const Packet>)
{
    if (g_flows[flow].firstNs < 0)
    {
        g_flows[flow].firstNs = Simulator::Now().GetNanoSeconds();
    }
}

void
Received(size_t flow, Ptr<const Packet> packet, const Address&)
{
    Flow& f = g_flows[flow];
    f.received += packet->GetSize();
    if (f.received >= f.bytes && f.doneNs < 0)
    {
        f.doneNs = Simulator::Now().GetNanoSeconds();
    }
}
} // namespace

int
main(int argc, char* argv[])
{
    if (argc != 2)
    {
        std::cerr << "usage: reference FILE\n";
        return 2;
    }
    struct Link
    {
        uint32_t a, b;
        uint64_t rate, delayNs;
    };
    std::vector<Link> links;
    uint32_t mss = 1448;
    uint32_t ssthresh = 0xffffffff;
    uint32_t window = 2;
    uint32_t mark = 0xffffffff;
    uint32_t seed = 1;
    uint32_t sack = 0;
    std::string congestion = "NewReno";
    std::string queue = "100";
    uint32_t nodeCount = 0;
    std::ifstream file(argv[1]);
    for (std::string line; std::getline(file, line);)
    {
        std::istringstream words(line);
        std::string kind;
        words >> kind;
        if (kind == "control")
        {
            words >> congestion;
        }
        else if (kind == "window")
        {
            words >> window;
        }
        else if (kind == "mark")
        {
            words >> mark;
        }
        else if (kind == "seed")
        {
            words >> seed;
        }
        else if (kind == "sack")
        {
            words >> sack;
        }
        else if (kind == "mss")
        {
            words >> mss;
        }
        else if (kind == "ssthresh")
        {
            words >> ssthresh;
        }
        else if (kind == "queue")
        {
            words >> queue;
        }
        else if (kind == "link")
        {
            Link l;
            words >> l.a >> l.b >> l.rate >> l.delayNs;
            links.push_back(l);
            nodeCount = std::max(nodeCount, std::max(l.a, l.b) + 1);
        }
        else if (kind == "flow")
        {
            Flow f;
            words >> f.id >> f.bytes >> f.startNs;
            for (uint32_t n; words >> n;)
            {
                f.path.push_back(n);
            }
            g_flows.push_back(f);
        }
    }

    // What the compared model does: see docs/netsim.md.
    const std::map<std::string, TypeId> controls = {{"NewReno", TcpNewReno::GetTypeId()},
                                                    {"CUBIC", TcpCubic::GetTypeId()},
                                                    {"DCTCP", TcpDctcp::GetTypeId()},
                                                    {"BBR", TcpBbr::GetTypeId()}};
    if (!controls.count(congestion))
    {
        std::cerr << "unknown control " << congestion << "\n";
        return 2;
    }
    RngSeedManager::SetSeed(seed);
    Config::SetDefault("ns3::TcpL4Protocol::SocketType", TypeIdValue(controls.at(congestion)));
    Config::SetDefault("ns3::TcpCubic::HyStart", BooleanValue(false));
    // Linux's faster growth before the first loss, which RFC 9438 does not have, begins above 255
    // segments instead of 20.
    Config::SetDefault("ns3::TcpCubic::CntClamp", UintegerValue(255));
    Config::SetDefault("ns3::TcpL4Protocol::RecoveryType",
                       TypeIdValue(sack ? TcpPrrRecovery::GetTypeId()
                                        : TcpClassicRecovery::GetTypeId()));
    Config::SetDefault("ns3::TcpSocketBase::Sack", BooleanValue(sack));
    Config::SetDefault("ns3::TcpSocketBase::Timestamp", BooleanValue(false));
    Config::SetDefault("ns3::TcpSocketBase::LimitedTransmit", BooleanValue(false));
    Config::SetDefault("ns3::TcpSocket::DelAckCount", UintegerValue(1));
    Config::SetDefault("ns3::TcpSocket::InitialCwnd", UintegerValue(window));
    Config::SetDefault("ns3::TcpSocket::InitialSlowStartThreshold", UintegerValue(ssthresh));
    Config::SetDefault("ns3::TcpSocket::SegmentSize", UintegerValue(mss));
    Config::SetDefault("ns3::TcpSocket::SndBufSize", UintegerValue(1 << 26));
    Config::SetDefault("ns3::TcpSocket::RcvBufSize", UintegerValue(1 << 26));

    NodeContainer nodes;
    nodes.Create(nodeCount);
    InternetStackHelper stack;
    Ipv4StaticRoutingHelper routing;
    stack.SetRoutingHelper(routing);
    stack.Install(nodes);
    std::map<std::pair<uint32_t, uint32_t>, uint32_t> interfaceTo;
    std::map<std::pair<uint32_t, uint32_t>, Ipv4Address> addressOn;
    Ipv4AddressHelper addresses("10.0.0.0", "255.255.255.252");
    for (const Link& l : links)
    {
        PointToPointHelper p2p;
        // No queue above the device, and no stop before its own is full: it drops what it cannot hold.
        p2p.DisableFlowControl();
        p2p.SetDeviceAttribute("DataRate", DataRateValue(DataRate(l.rate)));
        p2p.SetChannelAttribute("Delay", TimeValue(NanoSeconds(l.delayNs)));
        p2p.SetQueue("ns3::MarkingQueue",
                     "MaxSize",
                     StringValue(queue + "p"),
                     "Mark",
                     UintegerValue(mark));
        NetDeviceContainer devices = p2p.Install(nodes.Get(l.a), nodes.Get(l.b));
        Ipv4InterfaceContainer ends = addresses.Assign(devices);
        addresses.NewNetwork();
        interfaceTo[{l.a, l.b}] = ends.Get(0).second;
        interfaceTo[{l.b, l.a}] = ends.Get(1).second;
        addressOn[{l.a, l.b}] = ends.GetAddress(0);
        addressOn[{l.b, l.a}] = ends.GetAddress(1);
    }
    auto route = [&](const std::vector<uint32_t>& path) {
        Ipv4Address to = addressOn.at({path[path.size() - 1], path[path.size() - 2]});
        for (size_t i = 0; i + 1 < path.size(); i++)
        {
            Ptr<Ipv4> ip = nodes.Get(path[i])->GetObject<Ipv4>();
            routing.GetStaticRouting(ip)->AddHostRouteTo(
                to, addressOn.at({path[i + 1], path[i]}), interfaceTo.at({path[i], path[i + 1]}));
        }
    };
    for (size_t i = 0; i < g_flows.size(); i++)
    {
        Flow& f = g_flows[i];
        route(f.path);
        route({f.path.rbegin(), f.path.rend()});
        Ptr<Node> from = nodes.Get(f.path.front());
        Ptr<Node> to = nodes.Get(f.path.back());
        uint16_t port = 5000 + i;
        Ipv4Address address = addressOn.at({f.path.back(), f.path[f.path.size() - 2]});
        PacketSinkHelper sink("ns3::TcpSocketFactory",
                              InetSocketAddress(Ipv4Address::GetAny(), port));
        ApplicationContainer sinks = sink.Install(to);
        sinks.Start(Seconds(0));
        sinks.Get(0)->TraceConnectWithoutContext("Rx", MakeBoundCallback(&Received, i));
        BulkSendHelper bulk("ns3::TcpSocketFactory", InetSocketAddress(address, port));
        bulk.SetAttribute("MaxBytes", UintegerValue(f.bytes));
        ApplicationContainer sources = bulk.Install(from);
        sources.Start(NanoSeconds(f.startNs));
        sources.Get(0)->TraceConnectWithoutContext("Tx", MakeBoundCallback(&Sent, i));
    }
    Simulator::Stop(Seconds(1000));
    Simulator::Run();
    for (const Flow& f : g_flows)
    {
        std::cout << f.id << " " << (f.doneNs < 0 ? -1 : f.doneNs - f.firstNs) << "\n";
    }
    std::cout << "drops " << g_drops << "\nmarks " << g_marks << "\n";
    Simulator::Destroy();
    return 0;
}
